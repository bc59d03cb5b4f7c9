"""The kind ``arithmetic``: exact sums."""

from __future__ import annotations

from nemo_like.environments.kind import Kind

KIND = Kind(
    about="The reward is 1 when the response is exactly the reference answer and ended properly; else 0.",
    reward="1 for exactly the reference answer in a response that is not truncated",
    judge="nemo_like.environments.text_match:arithmetic",
    record_check="nemo_like.environments.record_needs:answer",
    is_harmless=True,
)
