"""The kind ``exact_match``: exact answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.environments.kind import Kind


@dataclass(kw_only=True, slots=True)
class ExactMatchOptions:
    answer_pattern: Annotated[
        str | None,
        Key("e.g. 'answer: (.*)': the last match's group 1 is compared; null: the whole response", None),
    ]
    ignore_case: Annotated[bool, Key("of letters", False)]
    must_end: Annotated[bool, Key("a response that ran into a token limit earns nothing", True)]


KIND = Kind(
    about="The reward is 1 when the response is the reference answer, spaces around it aside; else 0.",
    reward="1 for the reference answer, spaces around it aside",
    example="`{answer_pattern: 'answer: (.*)', ignore_case: true}`",
    options=ExactMatchOptions,
    judge="nemo_like.environments.text_match:exact_match",
    record_check="nemo_like.environments.record_needs:answer",
)
