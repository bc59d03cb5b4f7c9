"""The kind ``judge``: scores by a generative judge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.environments.endpoint_rules import START_REMEDY, api_key_problems, endpoint_problems
from nemo_like.environments.kind import Kind
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import options_of
from nemo_like.environments.shared_options import EndpointOptions


@dataclass(kw_only=True, slots=True)
class JudgeOptions(EndpointOptions):
    """A judge that gives each response a score.

    In its question, ``{prompt}``, ``{response}`` and ``{answer}`` stand for the sample's prompt, response and
    reference answer.
    """

    needed_words = ("response",)
    other_words = ("prompt", "answer")

    score_pattern: Annotated[
        str, Key("group 1 of its last match in the verdict is the score", "score: (-?\\d+(?:\\.\\d+)?)")
    ]
    min_score: Annotated[float, Key("a verdict with a score beyond these two counts as unreadable", 0.0)]
    max_score: Annotated[float, Key("gives the reward 1", 10.0)]


def _problems(name: str, envs: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    yield from endpoint_problems(name, envs)
    options: JudgeOptions = options_of(envs[name])
    if not -math.inf < options.min_score < options.max_score < math.inf:
        yield Problem(
            key=f"env.{name}.options.max_score={options.max_score:g}",
            rule=f"must be above min_score={options.min_score:g}, and both finite",
            remedy="they are the scores that give the rewards 0 and 1",
        )


KIND = Kind(
    about="A generative judge, behind any OpenAI-compatible API, gives each response a "
    "score. The reward is 0 at min_score, 1 at max_score, and linear between them.",
    reward="the score, from 0 to 1, that a [generative judge](reward_models.md#judges-and-preferences) gives",
    example="`{base_url: 'http://judge:8000/v1', model: my-judge}`",
    options=JudgeOptions,
    base={
        "timeout_s": Key("above request_timeout_s x max_attempts", 300.0),
        "max_concurrency": Key("requests that one actor has under way at once", 32),
        "batch_size": Key("no response waits for the verdict on another", 1),
    },
    judge="nemo_like.environments.judge:judge",
    record_check="nemo_like.environments.judge:has_answer_if_asked",
    start_remedy=START_REMEDY,
    problems=_problems,
    machine_problems=api_key_problems,
)
