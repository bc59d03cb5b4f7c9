"""``SharedGpus``: has engines that share GPUs with the policy hold what each stage of a run leaves them.

Within a stage the policy's own memory comes and goes with its calls: each takes what it needs and gives it up
when it returns (``policy.parking``). So whatever a stage gives up is given up before the next one takes it.
"""

from __future__ import annotations

from collections.abc import Callable

from nemo_like.cluster.stage import EngineHolds, Stage


class SharedGpus:
    """Knows in which stage the run is, and tells the engines when it enters another."""

    def __init__(self, hold: Callable[[EngineHolds], object], *, keeps_weights: bool) -> None:
        """``hold(what)`` makes every engine hold exactly that, and returns when all do.

        ``keeps_weights`` says whether engines that sleep keep their weights.
        """
        self._hold, self._keeps_weights = hold, keeps_weights
        self._held: EngineHolds | None = None
        self.have_weights = True  # the engines, those that were sent last

    def enter(self, stage: Stage) -> None:
        """Have every engine hold what the stage leaves it."""
        wanted = stage.engine_holds
        if wanted is not self._held:
            self._held = None  # should it fail half-way, nobody knows what the engines hold
            self.have_weights &= self._keeps_weights or wanted is not EngineHolds.nothing
            self._hold(wanted)
            self._held = wanted

    def forget(self) -> None:
        """Forget what the engines hold, so that the next stage tells them anew; for when some are new."""
        self._held = None
