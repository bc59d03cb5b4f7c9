"""The kind ``reasoning_gym``: problems of reasoning-gym."""

from __future__ import annotations

from nemo_like.environments.kind import Kind
from nemo_like.environments.shared_options import MatchOptions

KIND = Kind(
    about="The reward is the score, from 0 to 1, that the problem's reasoning-gym dataset gives the "
    "response.",
    reward="the score of the [reasoning-gym](https://pypi.org/project/reasoning-gym/) dataset that the "
    "problem came from (`pip install 'nemo_like[reasoning]'`)",
    example="`{answer_pattern: '<answer>(.*?)</answer>'}`",
    options=MatchOptions,
    judge="nemo_like.environments.library_judges:reasoning_gym",
    record_check="nemo_like.environments.library_judges:names_dataset",
    package=("reasoning_gym", "reasoning-gym"),
)
