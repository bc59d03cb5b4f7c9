"""The kind ``openenv``: environments of OpenEnv."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.environments.hub_rules import hub_kind
from nemo_like.environments.shared_options import HubOptions


@dataclass(kw_only=True, slots=True)
class OpenEnvOptions(HubOptions):
    """An environment behind a server of OpenEnv."""

    module = "openenv.core"
    adapter = "openenv_hub:OpenEnvHub"
    prompt_options = ("reset_arguments",)

    base_url: Annotated[str, Key("of the server, for example http://localhost:8000")]
    action: Annotated[
        dict[str, Any],
        Key("what is sent; {response} in its texts stands for the response", {"message": "{response}"}),
    ]
    action_pattern: Annotated[
        str | None,
        Key("regex: group 1 of its last match stands for the response; null: the whole response", None),
    ]
    reset_arguments: Annotated[dict[str, Any], Key("of a reset, besides seed", {})]
    observation_key: Annotated[
        str | None, Key("the field of observations that the policy sees; null: all of them, as JSON", None)
    ]
    prompt_template: Annotated[str, Key("{observation} stands for the first one", "{observation}")]
    observation_template: Annotated[
        str, Key("{observation} stands for the observation", ("\n{observation}\n"))
    ]
    message_timeout_s: Annotated[float, Key("for one answer of the server", 60.0, above=0)]


KIND = hub_kind(
    about="An environment of OpenEnv behind its server, which must allow as many sessions "
    "as there are conversations at once. Its problems are made by data.train={kind: "
    "environment, env: NAME, options: {size: 1000}}: resets with seeds.",
    reward="the rewards that an [OpenEnv](hubs.md#hubs) server gives, over the steps",
    example="`{base_url: 'http://game:8000', action: {message: '{response}'}}`",
    options=OpenEnvOptions,
    base={
        "max_turns": Key("", 16),
        "max_concurrency": Key("calls that one actor has under way at once", 32),
        "batch_size": Key("no turn waits for another's answer", 1),
        "timeout_s": Key("above message_timeout_s", 120.0),
    },
)
