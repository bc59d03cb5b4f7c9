"""The vLLM worker's side of a weight transfer.

Every worker process imports this module, because vLLM's argument ``worker_extension_cls`` names
``WeightReceiverExtension``. It loads by vLLM's layerwise reload, and uses none of vLLM's weight-transfer
engines (docs/explanation/weight_sync.md says why).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nemo_like.generation.expert_stacks import ExpertStacks, repack_experts
from nemo_like.generation.interface import WeightGroup
from nemo_like.generation.reload_mends import DirectParameters
from nemo_like.generation.weight_channels import IncomingWeights, NamedTensors, open_channel
from nemo_like.tripwires.measured import is_due
from nemo_like.tripwires.options import Tripwires
from nemo_like.tripwires.weight_digests import WeightsDigest
from nemo_like.weight_transport.changes import ChangeDecoder
from nemo_like.weight_transport.connections import Transfer, Word

# At every update this logger warns of layers that have nothing to load (rotary embedding, tied output
# layer). For weights that are really missing ``load`` raises an error. A level would not last: vLLM sets up
# its logging once more when an engine starts, and that resets the levels of its loggers.
logging.getLogger(initialize_layerwise_reload.__module__).addFilter(
    lambda record: record.levelno >= logging.ERROR
)


class WeightReceiverExtension:
    """Methods that vLLM mixes into every worker; the engine calls each of them on every worker."""

    # vLLM's worker has these.
    vllm_config: Any
    rank: int
    device: Any
    get_model: Any

    @property
    def weight_receiver(self) -> TrainerWeightReceiver:
        """This worker's receiver, made when it is first needed."""
        if "_weight_receiver" not in vars(self):
            device = torch.device(self.device)
            receiver = TrainerWeightReceiver(self.get_model(), self.vllm_config, self.rank, device)
            vars(self)["_weight_receiver"] = receiver
        receiver = vars(self)["_weight_receiver"]
        assert isinstance(receiver, TrainerWeightReceiver)
        return receiver

    def join_weight_group(self, group: WeightGroup) -> None:
        """Begin to join the group, as ``WeightReceiver`` says."""
        self.weight_receiver.join(group)

    def fetch_weights(self, transfer: Transfer, groups: Sequence[str]) -> None:
        """Wait for the tensors that these groups offer before the load, as ``WeightReceiver`` says."""
        self.weight_receiver.fetch(transfer, groups)

    def load_weight_groups(self, groups: Sequence[str]) -> int | None:
        """Load every tensor of these groups, and return their digest; None where none is computed."""
        self.weight_receiver.load(groups)
        return self.weight_receiver.digest()

    def write_adapter(self, groups: Sequence[str], path: str) -> int | None:
        """Receive the adapters of these groups; the first worker writes them into a directory as peft does.

        Returns their digest; None where none is computed.
        """
        self.weight_receiver.write_adapter(groups, Path(path))
        return self.weight_receiver.digest()

    def give_up_weights(self, transfer: Transfer) -> None:
        """Tell the senders that nothing of this transfer will be loaded."""
        self.weight_receiver.give_up(transfer)


class TrainerWeightReceiver:
    """Receives tensors under their Hugging Face names and loads them, in one session per version.

    A session covers all groups: if the tensors of a fused module (qkv, gate and up) came in two sessions,
    vLLM would pack the module from half-old weights.
    """

    def __init__(self, model: torch.nn.Module, vllm_config: Any, worker: int, device: torch.device) -> None:
        """Receive for the ``worker``-th worker of an engine."""
        self.model, self.vllm_config, self.worker, self.device = model, vllm_config, worker, device
        self._channels: dict[str, Future[IncomingWeights]] = {}
        self._changes: dict[str, ChangeDecoder] = {}
        self._adapter: Mapping[str, Any] | None = None
        self._transfer = Transfer(0, -1)
        self._tripwires = Tripwires.off
        # Of the latest transfer, by group; None where no digest is computed.
        self._digests: dict[str, WeightsDigest] | None = None
        self._joiner = ThreadPoolExecutor(thread_name_prefix="join_weight_group")

    def join(self, group: WeightGroup) -> None:
        """Begin to join the group in the background; leave an earlier group of the same name.

        In the foreground, engines that are asked to join several groups in different orders would wait for
        each other.
        """
        self._leave(group.name)
        self._tripwires = group.tripwires
        self._adapter = group.adapter
        if group.delta:
            self._changes[group.name] = ChangeDecoder(group.tensors)
        self._channels[group.name] = self._joiner.submit(open_channel, group, self.worker, self.device)

    def fetch(self, transfer: Transfer, groups: Sequence[str]) -> None:
        """Wait for the tensors that the senders of these groups offer before the load; change no weight.

        Raises a channel's error when they do not come.
        """
        self._transfer = transfer
        self._digests = {} if is_due(transfer.number, self._tripwires) else None
        for name in groups:
            self._channel(name).fetch(transfer)

    def give_up(self, transfer: Transfer) -> None:
        """Tell the senders of all joined groups that nothing of this transfer will be loaded."""
        self._end(transfer, Word.gave_up)

    def load(self, groups: Sequence[str]) -> None:
        """Load every tensor of the transfer that was fetched, and tell the senders.

        Raises RuntimeError that names the model's parameters for which no tensor was received.
        """
        with self._loading(), set_current_vllm_config(self.vllm_config):
            self._load_model(groups)

    def write_adapter(self, groups: Sequence[str], path: Path) -> None:
        """Receive the fetched transfer of adapters (by peft's names), and tell the senders. An engine's first
        worker writes the adapters into the directory ``path``, from which vLLM can load them."""
        with self._loading():
            tensors = {
                name: tensor.to("cpu", copy=True)
                for group in groups
                for part in self._received(group)
                for name, tensor in part
                if self.worker == 0
            }
            if self.worker == 0:
                save_file(tensors, path / "adapter_model.safetensors")
                (path / "adapter_config.json").write_text(json.dumps(self._adapter))

    def digest(self) -> int | None:
        """Return the digest of the latest transfer, summed over groups; None where none is computed."""
        return None if self._digests is None else sum(one.value() for one in self._digests.values())

    def arrived(self) -> dict[str, int]:
        """Return a digest of each tensor of the latest transfer, by name; empty where none is computed."""
        groups = (self._digests or {}).values()
        return {name: word for one in groups for name, word in one.by_name().items()}

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """Tell the senders after the block that the transfer is loaded. On an error, leave all groups, so
        that the senders and the engine's other workers fail now and not at a deadline."""
        try:
            yield
            self._end(self._transfer, Word.loaded)
        except Exception:
            for name in list(self._channels):
                self._leave(name)
            raise

    def _load_model(self, groups: Sequence[str]) -> None:
        loaded: set[str] = set()
        direct = DirectParameters(self.model)
        initialize_layerwise_reload(self.model)
        # Without what vLLM makes of a checkpoint's weights; yet a tied output layer is here by itself.
        to_load = {name for name, _ in self.model.named_parameters()}
        direct.put_back()
        experts = ExpertStacks(self.model, self.device)
        for name in groups:
            for tensors in self._received(name):
                if others := experts.take(tensors):
                    loaded |= self.model.load_weights(direct.single(others))
        loaded |= experts.loaded()
        finalize_layerwise_reload(self.model, self.vllm_config.model_config)
        if self.device.type == "cpu":
            self._repack_tied_output_layer()
            repack_experts(self.model)
        else:
            torch.cuda.synchronize(self.device)
        missing = to_load.intersection(name for name, _ in self.model.named_parameters()) - loaded
        if self.vllm_config.model_config.quantization is not None:  # scales are computed from the weights
            missing = {name for name in missing if "scale" not in name.rpartition(".")[2]}
        if missing:
            raise RuntimeError(
                f"the trainer sent no weights for {sorted(missing)[:8]} ({len(missing)} in all); "
                "trainer and engine must be built from the same checkpoint"
            )

    def _received(self, name: str) -> Iterator[NamedTensors]:
        """Yield the group's tensors, completed where only changed values are sent."""
        parts = self._channel(name).receive()
        if name in self._changes:
            parts = self._changes[name].decode(parts)
        if self._digests is None:
            yield from parts
            return
        digest = self._digests[name] = WeightsDigest()
        for tensors in parts:
            digest.add_all(tensors)
            yield tensors

    def _end(self, transfer: Transfer, how: Word) -> None:
        for channel in self._channels.values():
            if channel.done() and channel.exception() is None:
                channel.result().end(transfer, how)

    def _channel(self, name: str) -> IncomingWeights:
        """Wait until the group is joined, which has its own deadline, and return its channel."""
        return self._channels[name].result()

    def _leave(self, name: str) -> None:
        self._changes.pop(name, None)
        joined = self._channels.pop(name, None)
        if joined is not None and joined.done() and joined.exception() is None:
            joined.result().close()

    def _repack_tied_output_layer(self) -> None:
        """Pack the weight of a tied output layer again.

        On CPU the output layer multiplies by a packed copy of its weight. A tied weight is loaded through the
        embedding, and vLLM's reload does not pack it again.
        """
        # A model that reads images has its language model inside.
        language_model = getattr(self.model, "language_model", self.model)
        output = getattr(language_model, "lm_head", None)
        embedding = getattr(getattr(language_model, "model", None), "embed_tokens", None)
        if output is None or embedding is None or output is embedding:
            return
        if getattr(output, "weight", None) is embedding.weight:
            output.quant_method.process_weights_after_loading(output)
