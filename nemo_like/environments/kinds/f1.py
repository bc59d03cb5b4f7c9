"""The kind ``f1``: shared words."""

from __future__ import annotations

from nemo_like.environments.kind import Kind
from nemo_like.environments.shared_options import MatchOptions

KIND = Kind(
    about="The reward is the F1 of the words that the response shares with the reference "
    "answer, from 0 to 1, with SQuAD's normalisation.",
    reward="F1 of the words that response and reference share",
    example="`{answer_pattern: null}`",
    options=MatchOptions,
    judge="nemo_like.environments.text_match:f1",
)
