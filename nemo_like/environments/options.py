"""The keys that every environment has, ``env.<name>``; ``kind_options`` has those of each kind."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.generation.options import SamplingConfig
from nemo_like.policy.options import Device


class EnvironmentKind(Enum):
    """Kinds of environments; ``environments.kind_options`` has the options of each."""

    arithmetic = "arithmetic"
    exact_match = "exact_match"
    f1 = "f1"
    regex = "regex"
    json_schema = "json_schema"
    math_verify = "math_verify"
    reasoning_gym = "reasoning_gym"
    function = "function"
    custom = "custom"
    code = "code"
    http = "http"
    reward_model = "reward_model"
    judge = "judge"
    preference = "preference"
    weighted_sum = "weighted_sum"
    calculator = "calculator"
    sliding_puzzle = "sliding_puzzle"
    gymnasium = "gymnasium"
    textarena = "textarena"
    openenv = "openenv"
    verifiers = "verifiers"
    mcp = "mcp"
    agent = "agent"


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    """The keys that every kind of environment has; each kind's own file builds on this one. A configuration
    gives each environment a name, to which data sources refer, for example `- env@env.arithmetic:
    arithmetic`.
    """

    kind: Annotated[EnvironmentKind, Key("see the other files here")]
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


def component_weights(env: EnvConfig) -> dict[str, float]:
    """Return the weights of a weighted sum's components by name; {} where they are no mapping."""
    components = env.options.get("components")
    if not isinstance(components, Mapping):
        return {}
    return {str(name): weight for name, weight in components.items()}


def needs_gpu(env: EnvConfig) -> bool:
    """Return whether each actor of an environment computes on a GPU of its own."""
    return env.kind is EnvironmentKind.reward_model and env.options.get("device") == Device.cuda.value
