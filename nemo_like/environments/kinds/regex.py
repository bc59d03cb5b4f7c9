"""The kind ``regex``: a regular expression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.environments.kind import Kind


@dataclass(kw_only=True, slots=True)
class RegexOptions:
    pattern: Annotated[str, Key('^ and $ anchor it to the whole response, "." matches newlines too')]


KIND = Kind(
    about="The reward is 1 when the response contains a match of a regular expression; else 0.",
    reward="1 when the response contains a match",
    example="`{pattern: '<think>.*</think>'}`",
    options=RegexOptions,
    judge="nemo_like.environments.text_match:regex",
)
