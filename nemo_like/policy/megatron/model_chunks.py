"""The chunks of the model that one rank holds: one, or with an interleaved pipeline several, between which
the other stages have theirs.

Megatron-core numbers the layers of each chunk from 0. Here every name has the layer's number in the whole
model, so that a name belongs to one parameter of the stage.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator, _p2p_ops
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_like.algorithms.logprobs import LogprobSettings
from nemo_like.policy.megatron.weight_conversion import in_whole_model, loaded_tensors


class ModelChunks(torch.nn.ModuleList):
    """The chunks, from the first layers to the last; it scores as its last chunk does."""

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        super().__init__(chunks)

    @property
    def logprob_settings(self) -> LogprobSettings | None:
        """What scores are computed, or None in a critic's model."""
        settings: LogprobSettings | None = self[-1].logprob_settings
        return settings

    @logprob_settings.setter
    def logprob_settings(self, settings: LogprobSettings | None) -> None:
        self[-1].logprob_settings = settings

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all that a checkpoint has of this stage, with layers numbered in the whole model."""
        for chunk in self:
            for name, tensor in loaded_tensors(chunk):
                yield in_whole_model(name, first_layer(chunk)), tensor

    def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
        """Return Megatron-core's state for a checkpoint, whose names there are those of the whole model."""
        return {
            f"{prefix}{index}.{name.removeprefix(prefix)}": part
            for index, chunk in enumerate(self)
            for name, part in chunk.sharded_state_dict(prefix=prefix).items()
        }


def first_layer(chunk: GPTModel) -> int:
    """Return the number, from 0, of a chunk's first layer in the whole model."""
    return int(chunk.decoder.layers[0].layer_number) - 1


class NeighbourCommunicator(P2PCommunicator):
    """Has a rank's two neighbours tell it the shapes of micro-batches in an order that also holds where both
    are the same rank.

    With two stages Megatron-core would take the shape of a gradient for that of an activation. It would also
    wait until its own shape has been received before it sends what a neighbour waits for, and so each would
    wait for the other. Private parts: two methods of megatron-core 0.16.1, and its function for the tensors
    themselves.
    """

    def __init__(self, group: dist.ProcessGroup, config: TransformerConfig) -> None:
        super().__init__(group, config)
        self._told: list[tuple[dist.Work, list[Tensor | None]]] = []

    def _communicate(self, **options: Any) -> Any:
        received = super()._communicate(**options)
        for request, _ in self._told:
            request.wait()
        self._told.clear()
        return received

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        device = torch.cuda.current_device()
        sent = [
            None if tensor is None else torch.tensor(tensor.shape, device=device)
            for tensor in (tensor_send_prev, tensor_send_next)
        ]
        got = [
            torch.zeros(3, dtype=torch.int64, device=device) if is_expected else None
            for is_expected in (recv_prev, recv_next)
        ]
        requests = _p2p_ops(
            tensor_send_prev=sent[0],
            tensor_send_next=sent[1],
            tensor_recv_prev=got[0],
            tensor_recv_next=got[1],
            group=self.pp_group,
            prev_pipeline_rank=self.prev_rank,
            next_pipeline_rank=self.next_rank,
        )
        for name, request in requests.items():
            if name.startswith("recv"):
                request.wait()
            else:
                self._told.append((request, sent))  # the tensors must live until they have been sent
        before, after = ([0, 0, 0] if shape is None else shape.tolist() for shape in got)
        return before, after


@contextlib.contextmanager
def without_sync(chunks: Sequence[Any]) -> Iterator[None]:
    """Sum no gradients over ranks within the block."""
    with contextlib.ExitStack() as stack:
        for chunk in chunks:
            stack.enter_context(chunk.no_sync())
        yield
