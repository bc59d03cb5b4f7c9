"""``EngineWeightSender``: sends the trainer's weights to the engines, and drives the transfer.

One worker heads each pipeline stage and sends that stage's weights; stage 0's also coordinates the engines.
Where engines on several nodes map the trainer's memory, one replica on each node sends to the engines there,
and the first of these replicas coordinates all engines.

    stage 0's head (coordinator)      heads of the other stages       every engine
      pause(version) ───────────────────────────────────────────────▶  stops sampling
      offer                             offer
      fetch_weights(transfer, [pp0, pp1, ...]) ─────────────────────▶  waits for what is offered in advance
      ◀───────────────────────────────────────────────────────────────
      load_weights(version, [pp0, pp1, ...]) ───────────────────────▶  one session:
      deliver pp0 ──────────────────────────────────────────────────▶    load
                                        deliver pp1 ────────────────▶    load
      ◀────────────────────────────────── the version committed ─────  finalize, resume

A failure before the engines load leaves their present version in force, and they resume with it. An engine
that fails while loading holds a mix of two versions, so it serves no more.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import GetTimeoutError, RayError

from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.generation.interface import WeightEndpoint, WeightGroup
from nemo_like.generation.options import WeightTransport
from nemo_like.observability.metrics import Metric, maximum, mean, summed
from nemo_like.policy.options import Device
from nemo_like.tripwires.measured import WEIGHTS_DIGEST, is_due
from nemo_like.tripwires.options import Tripwires
from nemo_like.tripwires.weight_digests import WeightsDigest
from nemo_like.weight_sync.channels import (
    MemoryChannel,
    WeightChannel,
    Weights,
    broadcast_channel,
    cuda_channel,
)
from nemo_like.weight_transport.buckets import SentAdapter, TensorSpec, check_names
from nemo_like.weight_transport.changes import ChangeEncoder
from nemo_like.weight_transport.connections import GivenUp, Receivers, Transfer
from nemo_like.weight_transport.packing import as_announced

_LOOPBACK = "127.0.0.1"
# After a broken broadcast, each engine has this long to report what broke it.
_CAUSE_GRACE_S = 2.0


class EngineWeightSender:
    """Sends one pipeline stage's weights to the engines, from the worker that heads the stage (tp = cp = 0).

    It has the methods of ``WeightSender`` in policy/backends/interface.py.
    """

    def __init__(
        self,
        *,
        coordinates: Coordinates,
        device: Device,
        transport: WeightTransport,
        bucket_mib: int,
        timeout_s: float,
        replicas: Sequence[int] = (0,),
        delta: bool = False,
        tripwires: Tripwires = Tripwires.off,
    ) -> None:
        """Prepare the sender of the worker at ``coordinates``; connect to nothing yet.

        ``replicas`` lists the data-parallel replicas that send; where there are several, each sends to the
        engines on its own node.

        ``timeout_s`` is the deadline for connecting, the engines' start included, and for one send. With
        ``delta`` every send but the first after a connect sends only what changed. ``tripwires`` says in
        which transfers both sides compute the digest of the weights. Raises ValueError on a worker that heads
        no pipeline stage.
        """
        if coordinates.tp or coordinates.cp or coordinates.dp not in replicas:
            raise ValueError(
                f"rank {coordinates.rank} heads no pipeline stage (tp={coordinates.tp}, cp={coordinates.cp}, "
                f"dp={coordinates.dp}); only a worker with tp = cp = 0 and dp in {[*replicas]} sends weights"
            )
        self._is_first_replica, self._sends_to_own_node = coordinates.dp == replicas[0], len(replicas) > 1
        self._is_coordinator = coordinates.pp == 0 and self._is_first_replica
        self._group_names = [f"pp{stage}" for stage in range(coordinates.layout.pp)]
        self._group_name = self._group_names[coordinates.pp]
        self._device, self._transport = device, transport
        self._bucket_bytes = bucket_mib * 2**20
        self._timeout_s, self._tripwires = timeout_s, tripwires
        self._changes = ChangeEncoder() if delta else None
        self._engines: list[ActorHandle] = []
        self._tensors: tuple[TensorSpec, ...] = ()
        self._adapter: SentAdapter | None = None
        self._channel: WeightChannel | None = None
        self._num_transfers = 0

    def connect(
        self,
        receivers: Sequence[ActorHandle],
        tensors: Sequence[TensorSpec],
        adapter: SentAdapter | None = None,
    ) -> None:
        """Open a channel to the workers of the engines that this worker sends to, and close an earlier
        channel.

        ``tensors`` describes this stage's tensors, in the order in which every ``send`` brings them. With
        ``adapter`` the tensors are low-rank adapters, which the engines apply beside the weights that they
        hold. Raises ValueError when the configured transport cannot reach an engine, or two tensors have one
        name.
        """
        check_names(tensors)
        self.close()
        self._engines, self._tensors, self._num_transfers = list(receivers), tuple(tensors), 0
        self._adapter = adapter
        endpoints = self._own_engines()
        channel = self._make_channel(endpoints)
        joins: list[Call] = []
        first_rank = 1
        for engine, endpoint in endpoints:
            invitation = WeightGroup(
                self._group_name,
                channel.address,
                first_rank,
                self._bucket_bytes,
                self._tensors,
                self._changes is not None,
                None if adapter is None else adapter.config,
                self._tripwires,
            )
            joins.append(engine.submit("join_weight_group", invitation))
            first_rank += endpoint.num_workers
        for join in joins:
            join.result(self._timeout_s)
        channel.open()
        self._channel = channel

    def send(self, version: int, weights: Weights) -> Mapping[str, Metric]:
        """Bring every engine to ``version``.

        The coordinator returns once all engines have committed the version; the head of another stage returns
        once its weights are sent. Raises RuntimeError when the transfer fails; the coordinator's message
        says, as far as it knows, which version each engine serves now.
        """
        if self._channel is None:
            raise RuntimeError(f"send(version={version}) before connect: no engine has been met yet")
        deadline = time.monotonic() + self._timeout_s
        self._num_transfers += 1  # counted alike by the heads of all stages, since each makes the same calls
        transfer = Transfer(self._num_transfers, version)
        weights = as_announced(weights, self._tensors)
        digest: WeightsDigest | None = None
        if is_due(transfer.number, self._tripwires):
            digest = WeightsDigest()
            weights = digest.watching(weights)
        if self._changes is not None:
            if transfer.number == 1 or not _all_loaded(self._channel, transfer.number - 1):
                self._changes.forget()
            weights = self._changes.encode(weights)
        if self._is_coordinator:
            metrics = self._coordinate(transfer, self._channel, weights, deadline)
        else:
            self._channel.offer(transfer, weights)
            metrics = {"weight_sync_bytes": summed(_deliver(self._channel))}
        # Every replica sends the same weights, so one reports the digest; those of all stages are added up.
        if digest is not None and self._is_first_replica:
            metrics |= {WEIGHTS_DIGEST: summed(digest.value())}
        return metrics | self._saved(metrics["weight_sync_bytes"])

    def _coordinate(
        self, transfer: Transfer, channel: WeightChannel, weights: Weights, deadline: float
    ) -> dict[str, Metric]:
        """Send this stage's weights and have the engines load the weights of all stages."""
        self._prepare(transfer, channel, weights)
        started_s = time.monotonic()
        loads = [
            engine.submit("load_weights", transfer.version, self._group_names) for engine in self._engines
        ]
        try:
            sent_bytes = _deliver(channel)
        except Exception:
            _raise_cause(loads)
            raise
        _wait_for_commits(transfer.version, loads, deadline)
        return {
            "weight_sync_bytes": summed(sent_bytes),
            "weight_sync_load_s": maximum(time.monotonic() - started_s),
        }

    def close(self) -> None:
        """Close the channel to the engines. Safe to call twice."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _prepare(self, transfer: Transfer, channel: WeightChannel, weights: Weights) -> None:
        """Pause the engines, offer the weights and let the engines fetch them, as far as they can in advance.

        Up to here no engine's weights change. When a call fails, the engines go on with the version that they
        have, and RuntimeError is raised.
        """
        try:
            self._ask_all("pause", transfer.version)
            channel.offer(transfer, weights)
            self._ask_all("fetch_weights", transfer, self._group_names)
        except Exception as error:
            serving = self._resume_all(transfer)
            raise RuntimeError(
                f"policy version {transfer.version} was not transferred; {serving}: {error}"
            ) from error

    def _resume_all(self, transfer: Transfer) -> str:
        """Resume every engine that can go on, and return a text that says which version each engine
        serves."""
        serving = []
        for engine in self._engines:
            try:
                version = engine.submit("resume", transfer).result(self._timeout_s)
                serving.append(f"{engine.name} serves version {version}")
            except RayError:
                serving.append(f"{engine.name} does not serve")
        return ", ".join(serving)

    def _own_engines(self) -> list[tuple[ActorHandle, WeightEndpoint]]:
        """Return the engines that this worker sends to, all or those on its own node, each with its
        endpoint."""
        all_engines = list(zip(self._engines, self._ask_all("weight_endpoint"), strict=True))
        if not self._sends_to_own_node:
            return all_engines
        own_node = ray.get_runtime_context().get_node_id()
        return [(engine, endpoint) for engine, endpoint in all_engines if endpoint.node_id == own_node]

    def _make_channel(self, engines: Sequence[tuple[ActorHandle, WeightEndpoint]]) -> WeightChannel:
        own_node = ray.get_runtime_context().get_node_id()
        elsewhere = [engine.name for engine, endpoint in engines if endpoint.node_id != own_node]
        maps_memory = self._transport in (WeightTransport.shared_memory, WeightTransport.cuda_ipc)
        if elsewhere and maps_memory:
            raise ValueError(
                f"weights travel by {self._transport.value}, but {elsewhere} are on other nodes than the "
                "trainer; set generation.weight_transport=collective, on GPUs with cluster.placement=separate"
            )
        name, num_workers = self._group_name, sum(endpoint.num_workers for _, endpoint in engines)
        by_default = self._transport is WeightTransport.auto and self._device is Device.cpu
        if self._transport is WeightTransport.shared_memory or (by_default and not elsewhere):
            return MemoryChannel(Receivers(name, num_workers, self._timeout_s), self._tensors)
        if self._transport is WeightTransport.cuda_ipc:
            return cuda_channel(name, num_workers, self._timeout_s, self._bucket_bytes)
        host = str(ray.util.get_node_ip_address()) if elsewhere else _LOOPBACK
        return broadcast_channel(name, num_workers, self._timeout_s, host, self._device, self._bucket_bytes)

    def _saved(self, sent_bytes: Metric) -> dict[str, Metric]:
        """Return metrics of the bytes that sending changes or adapters saved; no metric where whole weights
        are sent."""
        saved: dict[str, Metric] = {}
        if self._changes is not None:
            whole_bytes = sum(spec.num_bytes for spec in self._tensors)
            saved["weight_sync_changed_share"] = mean(self._changes.num_changed, self._changes.num_values)
        elif self._adapter is not None:
            whole_bytes = self._adapter.whole_bytes
        else:
            return {}
        return {**saved, "weight_sync_saved_bytes": summed(whole_bytes - sent_bytes.value)}

    def _ask_all(self, method: str, *args: object) -> list:
        calls = [engine.submit(method, *args) for engine in self._engines]
        return [call.result(self._timeout_s) for call in calls]


def _deliver(channel: WeightChannel) -> int:
    """Send the offered weights, and return their number of bytes; 0 when the engines gave the transfer up.

    Any error closes the channel, so that engines which still wait for the rest fail at once.
    """
    try:
        return channel.deliver()
    except GivenUp:
        return 0  # the coordinator raises why
    except Exception:
        channel.close()
        raise


def _all_loaded(channel: WeightChannel, number: int) -> bool:
    """Return whether every engine loaded transfer ``number`` to its end; false when an engine does not
    answer."""
    try:
        return channel.receivers.all_loaded(number)
    except (RuntimeError, TimeoutError):
        return False


def _wait_for_commits(version: int, loads: Sequence[Call], deadline: float) -> None:
    """Wait for the answers of all engines until the deadline.

    Raises RuntimeError that names the engines that did not commit ``version``.
    """
    failures: dict[str, Exception] = {}
    for load in loads:
        try:
            committed = load.result(max(0.0, deadline - time.monotonic()))
            if committed != version:
                raise RuntimeError(f"it committed version {committed}")
        except (RayError, RuntimeError) as error:
            failures[load.actor] = error
    if failures:
        first = next(iter(failures.values()))
        raise RuntimeError(
            f"engines {sorted(failures)} did not load policy version {version} and serve no more; "
            f"{len(loads) - len(failures)} others serve it: {first}"
        ) from first


def _raise_cause(loads: Sequence[Call]) -> None:
    """Raise the error of the engine that broke the broadcast, if one reports an error in time."""
    for load in loads:
        try:
            load.result(_CAUSE_GRACE_S)
        except GetTimeoutError:
            continue
        except RayError:
            raise
