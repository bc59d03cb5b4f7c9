"""``EngineWeights``: the driver's side of a weight transfer, which brings all engines to a policy version.

``SharedGpus`` tells engines that share GPUs with the policy what to hold in each stage of a run. Within a
stage the policy takes GPU memory at the beginning of a call and frees it when the call returns
(policy/backends/parking.py). So a stage has freed its memory before the next stage takes any.

No tensor library is imported here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from nemo_like.cluster.stage import EngineHolds, Stage
from nemo_like.observability.metrics import Metric, maximum
from nemo_like.tripwires.measured import WEIGHTS_DIGEST


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


class EngineWeights:
    """Knows which version the engines serve, and has the trainer transfer its weights when they need another
    version."""

    def __init__(
        self,
        push_weights: Callable[[int], Mapping[str, Metric]],
        shared_gpus: SharedGpus | None = None,
    ) -> None:
        """Keep the function that transfers weights; transfer nothing yet.

        ``push_weights(version)`` makes the trainer transfer its weights, and returns once all engines have
        them. ``shared_gpus`` tells engines on the trainer's GPUs what to hold; None where engines and trainer
        share no GPU.
        """
        self._push_weights, self._shared_gpus = push_weights, shared_gpus
        self._version: int | None = None
        self._digest: float | None = None

    @property
    def digest(self) -> float | None:
        """The digest of the weights that the trainer sent last; None where it computed none."""
        return self._digest

    @property
    def version(self) -> int | None:
        """The policy version that every engine serves; None when that is not known."""
        return self._version

    def forget(self) -> None:
        """Forget which version the engines serve, so that the next ``ensure_version`` transfers again.

        Called when an engine is new and has no version yet.
        """
        self._version = None
        if self._shared_gpus is not None:
            self._shared_gpus.forget()

    def ensure_version(self, version: int) -> Mapping[str, Metric]:
        """Wait until every engine serves exactly this policy version.

        Nothing is sent when all engines serve it already, unless they lost their weights while they slept.

        Raises ValueError for a version older than the engines'. After a failed transfer the engines' version
        is unknown, so that the next call transfers again.
        """
        if version == self._version and self._have_weights:
            self._enter(Stage.generation)
            return {}
        if self._version is not None and version < self._version:
            raise ValueError(f"engines are at policy version {self._version}; version={version} is older")
        self._version = None
        started_s = time.monotonic()
        self._enter(Stage.weight_sync)
        sent = dict(self._push_weights(version))
        if self._shared_gpus is not None:
            self._shared_gpus.have_weights = True
        self._enter(Stage.generation)
        self._version = version
        digest = sent.pop(WEIGHTS_DIGEST, None)
        self._digest = None if digest is None else digest.value
        return {**sent, "weight_sync_s": maximum(time.monotonic() - started_s)}

    def end_generation(self) -> None:
        """Put engines that share GPUs with the trainer to sleep."""
        self._enter(Stage.logprobs)

    @property
    def _have_weights(self) -> bool:
        return self._shared_gpus is None or self._shared_gpus.have_weights

    def _enter(self, stage: Stage) -> None:
        if self._shared_gpus is not None:
            self._shared_gpus.enter(stage)


class NoEngines:
    """Stands in for ``EngineWeights`` where nothing is transferred: every version is in force at once."""

    version: int | None = None
    digest: float | None = None

    def forget(self) -> None:
        """Do nothing: no engine has a version to forget."""

    def ensure_version(self, version: int) -> Mapping[str, Metric]:
        """Return at once, without metrics."""
        return {}

    def end_generation(self) -> None:
        """Do nothing: there is no engine to put to sleep."""
