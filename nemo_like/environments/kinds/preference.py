"""The kind ``preference``: preferences by a generative judge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.environments.endpoint_rules import START_REMEDY, api_key_problems, endpoint_problems
from nemo_like.environments.kind import Kind
from nemo_like.environments.shared_options import EndpointOptions


@dataclass(kw_only=True, slots=True)
class PreferenceOptions(EndpointOptions):
    """A judge that says which of two answers is better: the response, or the reference answer.

    In its question, ``{prompt}``, ``{first}`` and ``{second}`` stand for the prompt and the two answers.
    """

    needed_words = ("first", "second")
    other_words = ("prompt",)

    prompt: Annotated[
        str,
        Key(
            "What the judge is asked. {prompt} stands for the sample's, {first} and {second} "
            "for the two answers.",
            (
                "Which answer to the question is better?\n"
                "\n"
                "Question:\n"
                "{prompt}\n"
                "\n"
                "Answer A:\n"
                "{first}\n"
                "\n"
                "Answer B:\n"
                "{second}\n"
                "\n"
                "End with [[A]], with [[B]], or, when both are equally good, with [[C]]."
            ),
        ),
    ]
    verdict_pattern: Annotated[
        str, Key("group 1 of its last match in the verdict is A, B, or C for a tie", "\\[\\[([ABC])\\]\\]")
    ]


KIND = Kind(
    about="A generative judge, behind any OpenAI-compatible API, says whether the response "
    "or the reference answer is better. It is asked twice, with the two in either "
    "order; the reward is the share that the response wins, a tie being half.",
    reward="the share that the response wins against the reference answer, by a judge's verdicts",
    example="`{base_url: 'http://judge:8000/v1', model: my-judge}`",
    options=PreferenceOptions,
    base={
        "timeout_s": Key("above request_timeout_s x max_attempts", 300.0),
        "max_concurrency": Key("responses that one actor has compared at once, by two requests each", 16),
        "batch_size": Key("no response waits for the verdict on another", 1),
    },
    judge="nemo_like.environments.judge:preference",
    record_check="nemo_like.environments.record_needs:answer",
    start_remedy=START_REMEDY,
    problems=endpoint_problems,
    machine_problems=api_key_problems,
)
