"""``EngineWeights``: the driver names a policy version and waits once. No tensor library is imported here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from nemo_like.observability.metrics import Metric, maximum


class EngineWeights:
    """Keeps the engines at the trainer's weights; the transfer itself is the trainer's work."""

    def __init__(
        self,
        push_weights: Callable[[int], Mapping[str, Metric]],
        put_to_sleep: Callable[[], object] | None = None,
    ) -> None:
        """``push_weights(version)`` is the trainer's whole transfer; it returns once all engines have it.
        ``put_to_sleep`` makes engines that share GPUs with the trainer give them up; they wake when asked.
        """
        self._push_weights, self._put_to_sleep = push_weights, put_to_sleep
        self._version: int | None = None

    @property
    def version(self) -> int | None:
        """What every engine serves; None when that is not known."""
        return self._version

    def forget(self) -> None:
        """Transfer again at the next call: there are engines that have nothing yet."""
        self._version = None

    def ensure_version(self, version: int) -> Mapping[str, Metric]:
        """Returns once every engine serves exactly this policy version; at once when they do already.

        Raises ValueError for a version older than the engines'. An error leaves the engines' version unknown,
        so that the next call transfers again.
        """
        if version == self._version:
            return {}
        if self._version is not None and version < self._version:
            raise ValueError(f"engines are at policy version {self._version}; version={version} is older")
        self._version = None
        started_s = time.monotonic()
        sent = self._push_weights(version)
        self._version = version
        return {**sent, "weight_sync_s": maximum(time.monotonic() - started_s)}

    def generation_is_over(self) -> None:
        """Engines that share GPUs with the trainer sleep from here; their version stays theirs."""
        if self._put_to_sleep is not None:
            self._put_to_sleep()


class NoEngines:
    """In place of ``EngineWeights`` where nothing generates: every version is fine."""

    version: int | None = None

    def forget(self) -> None:
        """Nothing to forget."""

    def ensure_version(self, version: int) -> Mapping[str, Metric]:
        """Returns at once."""
        return {}

    def generation_is_over(self) -> None:
        """There is nobody to put to sleep."""
