"""Checks the columns of every record at the start, so that a value that does not fit stops no later step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from nemo_like.data.datasets import Sources
from nemo_like.data.interface import PromptExample
from nemo_like.data.options import DatasetConfig, source_name
from nemo_like.rollout.rollout_columns import unfit_values


def check_records(
    section: Sequence[DatasetConfig],
    read: Sources,
    prompt_lengths: Callable[[Sequence[PromptExample]], Sequence[int]],
) -> None:
    """Check every prompt's values of the columns that the sources of ``section`` declare.

    ``read`` has the prompts of these sources. Raises ValueError for the first value that does not fit.
    """
    bounds = accumulate((report.num_prompts for report in read.reports), initial=0)
    for source, (start, stop) in zip(section, pairwise(bounds), strict=True):
        for index in range(start, stop) if source.columns else ():
            example = read.prompts[index]
            (num_tokens,) = prompt_lengths([example])
            for unfit in unfit_values(source, example, num_tokens):
                raise ValueError(
                    f"{source_name(source)}: the problem with the prompt {str(example.prompt)[:80]!r} "
                    f"cannot be used: {unfit}"
                ) from unfit
