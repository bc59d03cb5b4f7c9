"""The vLLM worker's side of a weight transfer: a vLLM weight-transfer engine for the trainer's channels.

Importing this module registers it with vLLM. Every worker process imports the module, because vLLM's argument
``worker_extension_cls`` names ``WeightReceiverExtension``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nemo_like.config.schema import Tripwires
from nemo_like.generation.interface import WeightGroup
from nemo_like.tripwires.dues import is_due
from nemo_like.tripwires.weight_digests import WeightsDigest
from nemo_like.weight_transport.process_groups import GroupAddress, NamedProcessGroup
from nemo_like.weight_transport.shared_memory import MemoryReceiver, Transfer

BACKEND = "nemo_like"

NamedTensors = list[tuple[str, torch.Tensor]]

# At every update this logger warns of layers that have nothing to load (rotary embedding, tied output
# layer). For weights that are really missing ``finish_weight_update`` raises an error.
logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)


class WeightReceiverExtension:
    """Methods that vLLM mixes into every worker; naming this class makes the worker import this module."""

    weight_transfer_engine: TrainerWeightReceiver

    def fetch_weights(self, transfer: Transfer, groups: Sequence[str]) -> None:
        """Wait for what these groups offer in advance, as ``WeightReceiver`` says. Runs on every worker."""
        self.weight_transfer_engine.fetch(transfer, groups)

    def weights_digest(self) -> int | None:
        """Return the digest of the weights that were received last; None where none is computed."""
        return self.weight_transfer_engine.digest()


@dataclass
class JoinInfo(WeightTransferInitInfo):
    group: WeightGroup


@dataclass
class ReceiveInfo(WeightTransferUpdateInfo):
    group: str


class _Channel(Protocol):
    """The receiving end of one weight group."""

    def fetch(self, transfer: Transfer) -> None:
        """Wait for what the sender offers before the load."""

    def receive(self) -> Iterator[NamedTensors]:
        """Yield the tensors, in parts."""

    def release(self) -> None:
        """Release what was received. To be called when all of it is loaded."""

    def close(self) -> None: ...


class _Memory:
    """Receives from a sender on this node: a whole version lies in shared memory before it is loaded."""

    def __init__(self, memory: MemoryReceiver) -> None:
        self._memory = memory
        self.fetch, self.release, self.close = memory.fetch, memory.release, memory.close

    def receive(self) -> Iterator[NamedTensors]:
        yield list(self._memory.tensors())


class _Broadcast:
    """Receives from a sender on any node: buckets arrive during the load."""

    def __init__(self, group: WeightGroup, process_group: NamedProcessGroup) -> None:
        self._group, self._process_group = group, process_group
        self.close = process_group.close

    def fetch(self, transfer: Transfer) -> None:
        """Do nothing: a broadcast offers nothing in advance."""

    def release(self) -> None:
        """Do nothing: no bucket is kept after its load."""

    def receive(self) -> Iterator[NamedTensors]:
        return self._process_group.receive(self._group.tensors, self._group.bucket_bytes)


class TrainerWeightReceiver(WeightTransferEngine[JoinInfo, ReceiveInfo]):
    """Receives tensors under their Hugging Face names and loads them, in one session per version.

    A session covers all groups: if the parts of a fused module (qkv, gate and up) came in two sessions, vLLM
    would pack the module from half-old weights.
    """

    init_info_cls = JoinInfo
    update_info_cls = ReceiveInfo
    supports_draft_weight_update = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._channels: dict[str, Future[_Channel]] = {}
        self._loaded: set[str] = set()
        self._tripwires = Tripwires.off
        # By group, of the latest transfer; None where it is not digested.
        self._digests: dict[str, WeightsDigest] | None = None
        self._joiner = ThreadPoolExecutor(thread_name_prefix="join_weight_group")

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Begin to join the group in the background; leave an earlier group of the same name.

        If this waited, engines that are asked to join several groups in different orders would wait for each
        other.
        """
        group = init_info.group
        self._leave(group.name)
        self._tripwires = group.tripwires
        self._channels[group.name] = self._joiner.submit(self._join, group)

    def fetch(self, transfer: Transfer, groups: Sequence[str]) -> None:
        """Wait for what the senders of these groups offer in advance; the model is not touched.

        Raises when it does not come.
        """
        self._digests = {} if is_due(transfer.number, self._tripwires) else None
        for name in groups:
            self._channel(name).fetch(transfer)

    def start_weight_update(self) -> None:
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        channel = self._channel(update_info.group)
        digest: WeightsDigest | None = None
        if self._digests is not None:
            digest = self._digests[update_info.group] = WeightsDigest()
        try:
            for tensors in channel.receive():
                if digest is not None:
                    digest.add_all(tensors)
                self._loaded |= self.model.load_weights(tensors)
        except Exception:
            # Closing makes the sender, and workers that receive beside this one, fail now, not at a deadline.
            channel.close()
            raise

    def digest(self) -> int | None:
        """Return the sum of the groups' digests of what was received last; None where none is computed."""
        return None if self._digests is None else sum(one.value() for one in self._digests.values())

    def finish_weight_update(self) -> None:
        """End the session: finish the loaded layers, and release what was received.

        Raises RuntimeError that names the model's parameters for which no tensor was received.
        """
        finalize_layerwise_reload(self.model, self.model_config)
        for name in self._channels:
            self._channel(name).release()
        if torch.device(self.device).type == "cpu":
            self._repack_tied_output_layer()
            self._repack_experts()
        missing = {name for name, _ in self.model.named_parameters()} - self._loaded
        if self.model_config.quantization is not None:  # scales are computed from the weights
            missing = {name for name in missing if "scale" not in name.rpartition(".")[2]}
        if missing:
            raise RuntimeError(
                f"the trainer sent no weights for {sorted(missing)[:8]} ({len(missing)} in all); "
                "trainer and engine must be built from the same checkpoint"
            )

    def shutdown(self) -> None:
        for name in list(self._channels):
            self._leave(name)
        self._joiner.shutdown(wait=False, cancel_futures=True)

    def _join(self, group: WeightGroup) -> _Channel:
        address = group.address
        if isinstance(address, GroupAddress):
            rank = group.first_rank + self.parallel_config.rank
            device = torch.device(self.device)
            return _Broadcast(group, NamedProcessGroup(address, rank=rank, device=device))
        return _Memory(MemoryReceiver(address, group.tensors, torch.device(self.device)))

    def _channel(self, name: str) -> _Channel:
        """Wait until the group is joined and return its channel. Joining has a deadline of its own."""
        return self._channels[name].result()

    def _leave(self, name: str) -> None:
        joined = self._channels.pop(name, None)
        if joined is not None and joined.done() and joined.exception() is None:
            joined.result().close()

    def _repack_tied_output_layer(self) -> None:
        """Pack the weight of a tied output layer again.

        On CPU the output layer multiplies by a packed copy of its weight. A tied weight is loaded through the
        embedding, and vLLM's reload does not pack it again.
        """
        output = getattr(self.model, "lm_head", None)
        embedding = getattr(getattr(self.model, "model", None), "embed_tokens", None)
        if output is None or embedding is None or output is embedding:
            return
        if getattr(output, "weight", None) is embedding.weight:
            output.quant_method.process_weights_after_loading(output)

    def _repack_experts(self) -> None:
        """Pack the experts' weights again.

        On CPU packed weights replace the experts' plain ones, but vLLM packs them at the engine's start only.
        A reload leaves plain weights, which would be read as packed ones.
        """
        for layer in self.model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None and getattr(layer, "w13_weight", None) is not None:
                kernel.fused_experts.process_weights_after_loading(layer)


WeightTransferEngineFactory.register_engine(BACKEND, TrainerWeightReceiver)
