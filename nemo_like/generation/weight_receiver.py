"""The vLLM worker's side of weight synchronisation: a weight-transfer engine over named process groups.

Importing this module registers the engine; ``WeightReceiverExtension``, named as vLLM's
``worker_extension_cls``, makes every worker process import it.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nemo_like.cluster.process_groups import GroupAddress, NamedProcessGroup
from nemo_like.generation.interface import WeightGroup

BACKEND = "named_groups"

# Warns, at every update, of layers that have nothing to load (rotary embedding, tied output layer).
# What is really missing is an error of ``finish_weight_update``.
logging.getLogger(initialize_layerwise_reload.__module__).setLevel(logging.ERROR)


class WeightReceiverExtension:
    """Nothing but a name through which every vLLM worker imports this module."""


@dataclass
class JoinInfo(WeightTransferInitInfo):
    group: WeightGroup


@dataclass
class ReceiveInfo(WeightTransferUpdateInfo):
    group: str


class NamedGroupReceiver(WeightTransferEngine[JoinInfo, ReceiveInfo]):
    """Receives Hugging Face tensors and loads them, one session per version over all groups.

    One session, because a fused module (qkv, gate and up) whose parts came in two would be
    packed from half-old weights.
    """

    init_info_cls = JoinInfo
    update_info_cls = ReceiveInfo
    supports_draft_weight_update = False

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self._groups: dict[str, tuple[WeightGroup, Future[NamedProcessGroup]]] = {}
        self._loaded: set[str] = set()
        self._joiner = ThreadPoolExecutor(thread_name_prefix="join_weight_group")

    def init_transfer_engine(self, init_info: JoinInfo) -> None:
        """Join in the background: engines asked to join several groups, each in another order, would wait for
        each other."""
        group = init_info.group
        address = GroupAddress(group.name, group.host, group.port, group.num_ranks, group.timeout_s)
        rank = group.first_rank + self.parallel_config.rank
        joined = self._joiner.submit(NamedProcessGroup, address, rank=rank, device=torch.device(self.device))
        self._groups[group.name] = (group, joined)

    def start_weight_update(self) -> None:
        self._loaded = set()
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: ReceiveInfo) -> None:
        group, joined = self._groups[update_info.group]
        process_group = joined.result(timeout=group.timeout_s)
        try:
            for tensors in process_group.receive(group.tensors, group.bucket_bytes):
                self._loaded |= self.model.load_weights(tensors)
        except Exception:
            # The other ranks must not wait for this one until their deadline.
            process_group.close()
            raise

    def finish_weight_update(self) -> None:
        """Raises RuntimeError, naming them, when parameters of the model were not among the tensors."""
        finalize_layerwise_reload(self.model, self.model_config)
        self._repack_tied_output_layer()
        missing = {name for name, _ in self.model.named_parameters()} - self._loaded
        if missing:
            raise RuntimeError(
                f"the trainer sent no weights for {sorted(missing)[:8]} ({len(missing)} in all); "
                "trainer and engine must be built from the same checkpoint"
            )

    def shutdown(self) -> None:
        for _, joined in self._groups.values():
            if joined.done() and joined.exception() is None:
                joined.result().close()
        self._groups.clear()
        self._joiner.shutdown(wait=False, cancel_futures=True)

    def _repack_tied_output_layer(self) -> None:
        """On CPU the output layer multiplies by a packed copy of its weight. A tied one is loaded through the
        embedding, and the reload does not pack it again."""
        output = getattr(self.model, "lm_head", None)
        embedding = getattr(getattr(self.model, "model", None), "embed_tokens", None)
        if output is None or embedding is None or output is embedding:
            return
        if getattr(output, "weight", None) is embedding.weight:
            output.quant_method.process_weights_after_loading(output)


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, NamedGroupReceiver)
