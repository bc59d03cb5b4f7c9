"""The kind ``gymnasium``: games with Gymnasium's interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.environments.hub_rules import hub_kind
from nemo_like.environments.shared_options import HubOptions


@dataclass(kw_only=True, slots=True)
class GymnasiumOptions(HubOptions):
    """An environment with Gymnasium's interface; its observations are text, or rendered as text."""

    module = "gymnasium"
    adapter = "gymnasium_hub:GymnasiumHub"
    prompt_options = ("env_id", "arguments")

    env_id: Annotated[str, Key("for example FrozenLake-v1; module:id imports the module first")]
    arguments: Annotated[
        dict[str, Any], Key("of gymnasium.make, for example {render_mode: ansi, is_slippery: false}", {})
    ]
    action_pattern: Annotated[
        str | None,
        Key("regex: group 1 of its last match is the action; null: the whole response, spaces aside", None),
    ]
    actions: Annotated[
        dict[str, Any],
        Key(
            "actions by the words for them, for example {left: 0, down: 1}; {}: numbers, or the text itself",
            {},
        ),
    ]
    invalid_reward: Annotated[
        float, Key("of a response that names no action; nothing happens, and the turn counts", 0.0)
    ]
    prompt_template: Annotated[str, Key("{observation} stands for the first one", "{observation}")]
    observation_template: Annotated[
        str, Key("{observation} stands for the observation", ("\n{observation}\n"))
    ]


KIND = hub_kind(
    about="A game with the interface of Gymnasium, whose observations are text, or are "
    "rendered as text. An episode is as many turns as it has steps. Its problems are "
    "made by data.train={kind: environment, env: NAME, options: {size: 1000}}.",
    reward="the rewards of a game with [Gymnasium's](hubs.md#hubs) interface, over its steps",
    example="`{env_id: FrozenLake-v1, arguments: {render_mode: ansi}, actions: {left: 0, right: 2}}`",
    options=GymnasiumOptions,
    base={
        "max_turns": Key("", 16),
        "max_concurrency": Key("calls under way at once; the package answers one after the other", 32),
        "batch_size": Key("", 32),
        "timeout_s": Key("", 120.0),
    },
)
