"""``WeightSync``: the driver names a policy version and waits once. No tensor library is imported here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from nemo_like.cluster.actors import Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.observability.metrics import Metric, maximum, merge


class WeightSync:
    """Keeps the engines at the trainer's weights; the transfer itself is the trainer's work."""

    def __init__(
        self, cluster: Cluster, push_weights: Callable[[int], Sequence[Call]], *, timeout_s: float
    ) -> None:
        """``push_weights(version)`` starts the trainer's transfer and returns its pending calls.

        Each results in a mapping of metrics, or None from a worker that sends nothing.
        """
        self._cluster = cluster
        self._push_weights = push_weights
        self._timeout_s = timeout_s
        self._version: int | None = None

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
        parts = self._cluster.gather(
            self._push_weights(version), stage="weight_sync", timeout_s=self._timeout_s
        )
        self._version = version
        return merge(
            [*(part for part in parts if part), {"weight_sync_s": maximum(time.monotonic() - started_s)}]
        )
