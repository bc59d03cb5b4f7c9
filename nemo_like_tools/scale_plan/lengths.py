"""The distribution of response lengths: log-normal, cut at the limit on new tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

_NORMAL = NormalDist()
_HALVINGS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Response lengths with mean ``mean`` and at most ``longest`` tokens.

    ``sigma`` is the standard deviation of the logarithm before the cut. Raises ValueError for a mean that no
    such distribution has.
    """

    mean: float
    longest: int
    sigma: float

    def __post_init__(self) -> None:
        if not 0 < self.mean < self.longest:
            raise ValueError(
                f"a mean of {self.mean:g} tokens must lie between 0 and the maximum, {self.longest:,}"
            )

    def quantile(self, share: float) -> float:
        """Return the length that a ``share`` of the responses does not exceed."""
        return min(float(self.longest), math.exp(self._mu + self.sigma * _NORMAL.inv_cdf(share)))

    @property
    def mean_square(self) -> float:
        """The mean of the squared length, which determines attention's cost."""
        return _clipped_moment(self._mu, self.sigma, self.longest, 2)

    @property
    def _mu(self) -> float:
        """The mean of the logarithm before the cut, found by bisection."""
        low, high = math.log(self.mean) - self.sigma**2, math.log(self.longest) + 10 * self.sigma
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            if _clipped_moment(middle, self.sigma, self.longest, 1) < self.mean:
                low = middle
            else:
                high = middle
        return high


def _clipped_moment(mu: float, sigma: float, longest: float, power: int) -> float:
    """Return the mean of min(X, longest) ** power for a log-normal X."""
    bound = (math.log(longest) - mu) / sigma
    below = math.exp(power * mu + (power * sigma) ** 2 / 2) * _NORMAL.cdf(bound - power * sigma)
    return below + longest**power * (1 - _NORMAL.cdf(bound))
