"""The keys that every environment has, ``env.<name>``; each file in ``kinds`` has the keys of one kind."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.config.kinds import Kinds
from nemo_like.generation.options import SamplingConfig

ENVIRONMENT_KINDS = Kinds(
    "nemo_like.environments.kinds", "kind of environment", "nemo_like.environments.kind:Kind", "options"
)


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    """The keys that every kind of environment has; each kind's own file builds on this one. A configuration
    gives each environment a name, to which data sources refer, for example `- env@env.arithmetic:
    arithmetic`."""

    kind: Annotated[str, Key("see the other files here", kinds=ENVIRONMENT_KINDS)]
    options: Annotated[dict[str, Any], Key("the kind's own", {})]
    num_actors: Annotated[int, Key("processes that judge in parallel", 1, at_least=0)]
    max_concurrency: Annotated[
        int,
        Key(
            "calls that one process has under way at once; above 1 only for environments that await",
            1,
            at_least=1,
        ),
    ]
    batch_size: Annotated[
        int, Key("turns that one call judges; their results arrive together", 128, at_least=1)
    ]
    timeout_s: Annotated[
        float,
        Key(
            "deadline of one call; a sample fails when judging its turn alone takes longer",
            30.0,
            above=0,
            below=math.inf,
        ),
    ]
    max_failed_share: Annotated[
        float,
        Key(
            "the run ends when a larger share of a step's or validation's samples failed; 1: never",
            0.5,
            at_least=0,
            at_most=1,
            remedy="0.5 ends the run when more than half of the rewards fail",
        ),
    ]
    check_at_start: Annotated[
        bool, Key("before training, judge the first problem's reference answer once, as a response", True)
    ]
    max_turns: Annotated[int, Key("responses per conversation", 1, at_least=1)]
    observation_role: Annotated[
        str,
        Key("under which a chat template renders what the environment says: user, tool or another", "user"),
    ]
    max_conversation_tokens: Annotated[
        int | None, Key("prompt, responses and observations; null: policy.max_total_sequence_length", None)
    ]
    sampling: Annotated[
        SamplingConfig, Key("settings that replace those of generation for this task; null: as there")
    ]
    validation_sampling: Annotated[
        SamplingConfig,
        Key("the same for validation; null: as generation.validation says, else as in training"),
    ]
