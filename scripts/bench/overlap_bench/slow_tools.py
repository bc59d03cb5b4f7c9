"""An environment that judges as the demo's does, after a time that depends on a seed and the sample alone."""

from __future__ import annotations

import asyncio
import hashlib
import math
import statistics
from collections.abc import Sequence

from nemo_like.environments.interface import Feedback, Turn

_STANDARD_NORMAL = statistics.NormalDist()


class SlowTools:
    """Gives 1 for exactly the reference answer; each answer takes a log-normal time, in which it sleeps."""

    def __init__(self, *, seed: int, median_s: float, sigma: float) -> None:
        """``sigma`` is the standard deviation of the latency's logarithm."""
        self._seed, self._median_s, self._sigma = seed, median_s, sigma

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Judge the turns of a call side by side: the call takes as long as the slowest of them."""
        return await asyncio.gather(*map(self._judged, turns))

    async def _judged(self, turn: Turn) -> Feedback:
        await asyncio.sleep(latency_s(self._seed, turn, self._median_s, self._sigma))
        return Feedback({"exact_match": float(not turn.is_truncated and turn.response == turn.answer)})


def latency_s(seed: int, turn: Turn, median_s: float, sigma: float) -> float:
    """Return how long a turn takes: the same for the same seed, prompt, and number of the turn."""
    digest = hashlib.sha256(f"{seed}/{turn.prompt}/{turn.number}".encode()).digest()
    uniform = (int.from_bytes(digest[:8], "big") + 0.5) / 2**64
    return median_s * math.exp(sigma * _STANDARD_NORMAL.inv_cdf(uniform))
