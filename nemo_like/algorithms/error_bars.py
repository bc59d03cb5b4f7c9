"""Standard errors and confidence intervals of an evaluation's metrics, clustered by problem.

Answers to one problem resemble each other; only the problems were drawn independently. So each problem is a
cluster, as in Miller, "Adding Error Bars to Evals" (arXiv 2411.00640). The intervals also hold for few
problems, and for problems that hardly any answer solves:

    a mean of rewards   value +- t * standard error, t of Student's distribution for n - 1 problems
    a share             Wilson's score interval for as many independent answers as have this standard error,
                        m (1 - m) / error^2, with t in place of the normal quantile: as for shares in surveys
                        (Korn and Graubard, Survey Methodology 24, 1998)

Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean, stdev

CONFIDENCE = 0.95
METHOD = (
    "standard errors are clustered by problem (arXiv 2411.00640), intervals for a coverage of "
    f"{CONFIDENCE:.0%} are Wilson's for shares and Student's for rewards; pass@k is the unbiased estimator "
    "of arXiv 2107.03374"
)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems, and how far it may be from the mean over all problems of this kind.

    The standard error is None for a single problem, which tells nothing of others. ``num_problems`` and
    ``num_answers`` count the problems and answers in the mean. ``is_share`` says that it is a mean of numbers
    from 0 to 1: a share of answers or of problems.
    """

    value: float
    standard_error: float | None
    num_problems: int
    num_answers: int
    is_share: bool = False

    def as_share(self) -> Estimate:
        """Return the same estimate with ``is_share`` true."""
        return replace(self, is_share=True)

    @property
    def interval(self) -> tuple[float, float] | None:
        """The ends of the confidence interval; None without a standard error."""
        if self.standard_error is None:
            return None
        quantile = student_quantile(self.num_problems - 1)
        if self.is_share:
            return self._of_share(self.standard_error, quantile)
        half = quantile * self.standard_error
        return self.value - half, self.value + half

    def _of_share(self, error: float, quantile: float) -> tuple[float, float]:
        """Return Wilson's interval for the number of independent answers that would have this standard error,
        but at most ``num_answers``.

        Where all problems agree, so that the error is 0 up to rounding, each problem counts as one answer.
        """
        share, size = self.value, float(self.num_problems)
        if error > 0 and 0 < share < 1:
            unbiased = error**2 * (self.num_problems - 1) / self.num_problems
            size = min(share * (1 - share) / unbiased, float(self.num_answers))
        square = quantile**2 / size
        middle = (share + square / 2) / (1 + square)
        half = math.sqrt(share * (1 - share) * square + square**2 / 4) / (1 + square)
        # The share itself lies inside, even after rounding.
        return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))


def over_problems(values: Sequence[float], num_answers: int | None = None) -> Estimate:
    """Return the mean of one value per problem; its error is their standard deviation / sqrt(n).

    ``num_answers`` is the number of answers behind all values; None: one answer each. Raises
    statistics.StatisticsError for no values.
    """
    count = len(values)
    error = stdev(values) / math.sqrt(count) if count > 1 else None
    return Estimate(fmean(values), error, count, count if num_answers is None else num_answers)


def over_answers(problems: Sequence[Sequence[float]]) -> Estimate:
    """Return the mean over all answers of all problems; ``problems`` has a sequence of values for each.

    The variance is the sum over problems of the squared sum of their answers' deviations, divided by the
    squared number of answers, with the factor n / (n - 1) for n problems. With equally many answers to each
    problem this is ``over_problems`` of the problems' means. Raises StatisticsError for no answers.
    """
    judged = [values for values in problems if values]
    mean = fmean(value for values in judged for value in values)
    count, num_problems = sum(map(len, judged)), len(judged)
    error = None
    if num_problems > 1:
        square = sum(math.fsum(value - mean for value in values) ** 2 for values in judged)
        error = math.sqrt(square * num_problems / (num_problems - 1)) / count
    return Estimate(mean, error, num_problems, count)


@lru_cache
def student_quantile(degrees: int) -> float:
    """Return the t for which |T| <= t has probability CONFIDENCE under Student's distribution."""
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # until float64 has no finer step
        middle = (low + high) / 2
        if _student_within(middle, degrees) < CONFIDENCE:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(degrees)


def _student_within(angle: float, degrees: int) -> float:
    """Return the probability of |t| < tan(angle) sqrt(degrees).

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = degrees % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for power in range(3 if is_odd else 2, degrees - 1, 2):
        term *= cosine**2 * (power - 1) / power
        total += term
    return (angle + sine * total) * 2 / math.pi if is_odd else sine * total
