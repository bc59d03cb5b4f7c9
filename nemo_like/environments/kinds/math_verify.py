"""The kind ``math_verify``: expressions, by math-verify."""

from __future__ import annotations

from nemo_like.config.keys import Key
from nemo_like.environments.kind import Kind
from nemo_like.environments.shared_options import MatchOptions

KIND = Kind(
    about="The reward is 1 when math-verify finds the response's last expression equal to "
    "the reference answer; else 0.",
    reward="1 for an expression equal to the reference, by [math-verify](https://pypi.org/project/math-verify/)",
    example="`{answer_pattern: null}`",
    options=MatchOptions,
    base={"timeout_s": Key("each symbolic comparison may take seconds", 60.0), "batch_size": Key("", 16)},
    judge="nemo_like.environments.library_judges:math_verify",
    record_check="nemo_like.environments.library_judges:has_expression",
    package=("math_verify", "math-verify[antlr4_9_3]"),
)
