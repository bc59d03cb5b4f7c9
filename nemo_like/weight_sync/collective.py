"""``CollectiveWeightSender``: the trainer broadcasts its weights to the engines, and drives the transfer.

    stage 0's head (coordinator)      heads of the other stages       every engine
      pause(version) ───────────────────────────────────────────────▶  stops sampling
      receive_weights(version, [pp0, pp1, ...]) ────────────────────▶  one session:
      pp0: bucket, bucket, ... ─────────────────────────────────────▶    load
                                        pp1: bucket, ... ───────────▶    load
      ◀────────────────────────────────── the version committed ─────  finalize, resume

One named group per pipeline stage; the stage's head is rank 0 and all engines' workers follow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

import ray
import torch
from ray.exceptions import GetTimeoutError, RayError

from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.buckets import TensorSpec
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.cluster.process_groups import GroupAddress, NamedProcessGroup, Rendezvous
from nemo_like.config.schema import Device
from nemo_like.generation.interface import WeightEndpoint, WeightGroup
from nemo_like.observability.metrics import Metric, summed

_LOOPBACK = "127.0.0.1"
# After a broken broadcast: how long an engine has to say what broke it.
_CAUSE_GRACE_S = 2.0


class CollectiveWeightSender:
    """Lives in the worker that heads a pipeline stage (tp = cp = dp = 0); see ``policy.WeightSender``."""

    def __init__(
        self, *, coordinates: Coordinates, device: Device, bucket_mib: int, timeout_s: float
    ) -> None:
        """``coordinates`` are the worker's. ``timeout_s`` is the deadline for connecting, the engines' start
        included, and for one send.

        Raises ValueError on a worker that heads no stage.
        """
        if coordinates.tp or coordinates.cp or coordinates.dp:
            raise ValueError(
                f"rank {coordinates.rank} heads no pipeline stage (tp={coordinates.tp}, cp={coordinates.cp}, "
                f"dp={coordinates.dp}); only a worker with tp = cp = dp = 0 sends weights"
            )
        self._stage = coordinates.pp
        self._is_coordinator = coordinates.pp == 0
        self._group_names = [f"pp{stage}" for stage in range(coordinates.layout.pp)]
        self._device = torch.device(f"cuda:{torch.cuda.current_device()}" if device is Device.cuda else "cpu")
        self._bucket_bytes = bucket_mib * 2**20
        self._timeout_s = timeout_s
        self._engines: list[ActorHandle] = []
        self._tensors: tuple[TensorSpec, ...] = ()
        self._group: NamedProcessGroup | None = None

    def connect(self, receivers: Sequence[ActorHandle], tensors: Sequence[TensorSpec]) -> None:
        """Meet the workers of every engine; ``tensors`` are this stage's, in the order of each ``send``."""
        self._engines, self._tensors = list(receivers), tuple(tensors)
        endpoints: list[WeightEndpoint] = self._ask_all("weight_endpoint")
        rendezvous = Rendezvous(_own_host(endpoints), self._timeout_s)
        num_ranks = 1 + sum(endpoint.num_workers for endpoint in endpoints)
        address = GroupAddress(
            self._group_names[self._stage], rendezvous.host, rendezvous.port, num_ranks, self._timeout_s
        )
        joins: list[Call] = []
        first_rank = 1
        for engine, endpoint in zip(self._engines, endpoints, strict=True):
            joins.append(engine.submit("join_weight_group", self._invitation(address, first_rank)))
            first_rank += endpoint.num_workers
        for join in joins:
            join.result(self._timeout_s)
        self._group = NamedProcessGroup(address, rank=0, device=self._device, rendezvous=rendezvous)

    def send(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> Mapping[str, Metric]:
        """Bring every engine to ``version``. The coordinator returns once all have committed it, the heads of
        the other stages once their weights are sent.

        Raises what an engine raised, and RuntimeError when one committed another version.
        """
        if self._group is None:
            raise RuntimeError(f"send(version={version}) before connect: no engine has been met yet")
        deadline = time.monotonic() + self._timeout_s
        receives: list[Call] = []
        if self._is_coordinator:
            self._ask_all("pause", version)
            receives = [
                engine.submit("receive_weights", version, self._group_names) for engine in self._engines
            ]
        try:
            sent_bytes = self._group.send(self._tensors, weights, self._bucket_bytes)
        except RuntimeError:
            _raise_cause(receives)
            raise
        for receive in receives:
            committed = receive.result(max(0.0, deadline - time.monotonic()))
            if committed != version:
                raise RuntimeError(
                    f"engine {receive.actor!r} committed version {committed} instead of {version}"
                )
        return {"weight_sync_bytes": summed(sent_bytes)}

    def close(self) -> None:
        """Leave the group; safe to call twice."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _ask_all(self, method: str, *args: object) -> list:
        calls = [engine.submit(method, *args) for engine in self._engines]
        return [call.result(self._timeout_s) for call in calls]

    def _invitation(self, address: GroupAddress, first_rank: int) -> WeightGroup:
        return WeightGroup(
            name=address.name,
            host=address.host,
            port=address.port,
            num_ranks=address.num_ranks,
            first_rank=first_rank,
            timeout_s=address.timeout_s,
            bucket_bytes=self._bucket_bytes,
            tensors=self._tensors,
        )


def _own_host(endpoints: Sequence[WeightEndpoint]) -> str:
    """Loopback when every engine is on this node, else this node's address."""
    own_node = ray.get_runtime_context().get_node_id()
    if all(endpoint.node_id == own_node for endpoint in endpoints):
        return _LOOPBACK
    return str(ray.util.get_node_ip_address())


def _raise_cause(receives: Sequence[Call]) -> None:
    """The error of an engine that broke the broadcast, if one has any to tell."""
    for receive in receives:
        try:
            receive.result(_CAUSE_GRACE_S)
        except GetTimeoutError:
            continue
        except RayError:
            raise
