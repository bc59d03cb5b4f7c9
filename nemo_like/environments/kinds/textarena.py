"""The kind ``textarena``: games of TextArena."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.environments.hub_rules import hub_kind
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import options_of
from nemo_like.environments.shared_options import HubOptions


@dataclass(kw_only=True, slots=True)
class TextArenaOptions(HubOptions):
    """A game of TextArena, in which the policy is player 0."""

    module = "textarena"
    adapter = "textarena_hub:TextArenaHub"
    prompt_options = ("env_id", "arguments", "num_players")

    env_id: Annotated[str, Key("for example TowerOfHanoi-v0")]
    arguments: Annotated[dict[str, Any], Key("of textarena.make", {})]
    num_players: Annotated[int, Key("the policy among them", 1, above=0)]
    opponent: Annotated[
        str | None,
        Key(
            "with several players, module:function, which returns a player's move for what that player sees",
            None,
        ),
    ]


def _opponent(name: str, envs: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    options: TextArenaOptions = options_of(envs[name])
    if options.num_players > 1 and options.opponent is None:
        yield Problem(
            key=f"env.{name}.options.opponent=null",
            rule=f"leaves {options.num_players - 1} of the players without moves",
            remedy="name a function, module:function, that moves for what a player sees; or num_players=1",
        )


KIND = hub_kind(
    about="A game of TextArena, in which the policy is player 0. Its problems are made by "
    "data.train={kind: environment, env: NAME, options: {size: 1000}}.",
    reward="the reward of a [TextArena](hubs.md#hubs) game at its end",
    example="`{env_id: TowerOfHanoi-v0}`",
    options=TextArenaOptions,
    base={
        "max_turns": Key("", 16),
        "max_concurrency": Key("calls under way at once; the package answers one after the other", 32),
        "batch_size": Key("", 32),
        "timeout_s": Key("", 120.0),
    },
    problems=_opponent,
)
