"""``SharedGpus``: tells engines that share GPUs with the policy what to hold in them in each stage of a run.

Within a stage the policy takes GPU memory at the beginning of a call and frees it when the call returns
(policy/backends/parking.py). So a stage has freed its memory before the next stage takes any.
"""

from __future__ import annotations

from collections.abc import Callable

from nemo_like.cluster.stage import EngineHolds, Stage


class SharedGpus:
    """Knows in which stage the run is, and tells the engines when the run enters another stage."""

    def __init__(self, hold: Callable[[EngineHolds], object], *, keeps_weights: bool) -> None:
        """Keep ``hold(what)``, which makes every engine hold exactly ``what`` and returns when all do.

        ``keeps_weights`` says whether engines that sleep keep their weights.
        """
        self._hold, self._keeps_weights = hold, keeps_weights
        self._held: EngineHolds | None = None
        self.have_weights = True  # whether the engines hold the weights that were sent last

    def enter(self, stage: Stage) -> None:
        """Have every engine hold what ``stage`` leaves room for; do nothing where the engines hold that
        already."""
        wanted = stage.engine_holds
        if wanted is not self._held:
            self._held = None  # when ``hold`` fails half-way, nobody knows what the engines hold
            self.have_weights &= self._keeps_weights or wanted is not EngineHolds.nothing
            self._hold(wanted)
            self._held = wanted

    def forget(self) -> None:
        """Forget what the engines hold, so that the next ``enter`` tells all of them; called when an engine
        is new."""
        self._held = None
