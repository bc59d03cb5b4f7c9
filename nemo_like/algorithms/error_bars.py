"""Standard errors and confidence intervals of what an evaluation measures, clustered by problem.

Answers to one problem resemble each other, so the problems are what was drawn independently: each is a
cluster, as in Miller, "Adding Error Bars to Evals" (arXiv 2411.00640). Intervals are normal, from the central
limit theorem over problems, and are not cut at 0 and 1. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
METHOD = (
    "standard errors are clustered by problem (arXiv 2411.00640), intervals are normal with a coverage of "
    f"{CONFIDENCE:.0%}; pass@k is the unbiased estimator of arXiv 2107.03374"
)
_QUANTILE = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean, and how far it may be from that over all problems like these.

    One problem tells nothing of others: then the standard error is None.
    """

    value: float
    standard_error: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """The ends of the confidence interval; None without a standard error."""
        if self.standard_error is None:
            return None
        half = _QUANTILE * self.standard_error
        return self.value - half, self.value + half


def over_problems(values: Sequence[float]) -> Estimate:
    """Return the mean of one value per problem; its error is their standard deviation / sqrt(n).

    Raises statistics.StatisticsError for no values.
    """
    error = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(fmean(values), error)


def over_answers(problems: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean over all answers of all problems, each of which has one value per answer or none.

    The variance is the sum over problems of the squared sum of their answers' deviations, divided by the
    squared number of answers, with the factor n / (n - 1) for n problems. With equally many answers to each
    problem this is ``over_problems`` of the problems' means. Raises StatisticsError for no answers.
    """
    judged = [values for values in problems if values]
    mean = fmean(value for values in judged for value in values)
    count, num_problems = sum(map(len, judged)), len(judged)
    if num_problems < 2:
        return Estimate(mean, None)
    square = sum(math.fsum(value - mean for value in values) ** 2 for values in judged)
    return Estimate(mean, math.sqrt(square * num_problems / (num_problems - 1)) / count)
