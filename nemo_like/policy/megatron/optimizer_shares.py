"""Loads the moments of an optimizer that is sharded over data-parallel ranks from a checkpoint.

A checkpoint has three float32 tensors per parameter: the parameter and its two moments. Megatron-core would
have every rank read all of them and keep its own part. Here the first rank of each data-parallel group reads,
and sends each other rank its part, so that a node's memory holds the tensors once, and not once for each of
its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_like.policy.megatron.optimizer import chained_optimizers

# For each parameter, by its number in Megatron-core's order: the parameter's tensors by name.
_Moments = dict[int, dict[str, Tensor]]
_STATE = "param_state"


class UntouchedZeros(TorchFunctionMode):
    """Within this context ``torch.zeros`` on the CPU takes no memory until an element is written or read.

    Megatron-core allocates a whole optimizer's state on every rank, even where only a part of it is used.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs == {"dtype": torch.float32, "device": "cpu"}:
            (shape,) = args
            return torch.from_numpy(np.zeros(shape, np.float32))
        return func(*args, **kwargs)


class OptimizerShares:
    """This rank's part of the moments of one optimizer."""

    def __init__(self, optimizer: DistributedOptimizer, wanted: ShardedStateDict) -> None:
        """Prepare to load ``wanted``, the state of ``optimizer``.

        On a rank that does not read, the moments are taken out of ``wanted``; their memory is used only as
        far as ``complete`` writes to it.
        """
        self._group = optimizer.data_parallel_group_gloo
        self._is_reader = dist.get_rank(self._group) == 0
        self._ranges = dict(_own_ranges(optimizer))
        self._moments: _Moments = {}
        if not self._is_reader:
            self._moments = {
                number: {name: _data(value) for name, value in tensors.items()}
                for number, tensors in wanted.pop(_STATE).items()
            }

    def complete(self, state: dict[str, Any]) -> None:
        """Add the moments to the loaded ``state`` on every rank of the group; all ranks call this."""
        size = dist.get_world_size(self._group)
        asked: list[Any] = [None] * size
        dist.gather_object(self._ranges, asked if self._is_reader else None, group=self._group, group_dst=0)
        if self._is_reader:
            for rank in range(1, size):
                for piece in _pieces(state[_STATE], asked[rank]):
                    dist.send(piece.contiguous(), group=self._group, group_dst=rank)
        else:
            for piece in _pieces(self._moments, self._ranges):
                dist.recv(piece, group=self._group, group_src=0)
            state[_STATE] = self._moments


def sharded_parts(optimizer: MegatronOptimizer) -> dict[int | None, DistributedOptimizer]:
    """Return the sharded optimizers of a chain, by their key in the chain's state. A single optimizer has the
    key None, since its state is the chain's."""
    parts = chained_optimizers(optimizer)
    keys = range(len(parts)) if len(parts) > 1 else [None]
    return {
        key: part for key, part in zip(keys, parts, strict=True) if isinstance(part, DistributedOptimizer)
    }


@contextmanager
def places_in_gathered_tensors(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Have Megatron-core find each parameter's part of a gathered optimizer within the block.

    The gathered tensors have no padding between buckets, but Megatron-core looks for parameters at their
    places with that padding. So a parameter behind padding, such as a tied embedding on a pipeline's first
    stage, would be stored with its neighbours' values.
    """
    buffers = [buffer for part in sharded_parts(optimizer).values() for buffer in part.buffers]
    padded = [buffer.param_index_map for buffer in buffers]
    for buffer in buffers:
        buffer.param_index_map = _unpadded_places(buffer)
    try:
        yield
    finally:
        for buffer, places in zip(buffers, padded, strict=True):
            buffer.param_index_map = places


def _unpadded_places(buffer: Any) -> dict[Any, tuple[int, int, int]]:
    """Return ``buffer.param_index_map``, of (start, end, bucket), without the padding between buckets."""
    sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
    padding = [bucket.offset - sum(sizes[:index]) for index, bucket in enumerate(buffer.buckets)]
    return {
        param: (start - padding[bucket], end - padding[bucket], bucket)
        for param, (start, end, bucket) in buffer.param_index_map.items()
    }


def _own_ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield the number of each parameter that this rank keeps a part of, and where that part begins and ends
    in the flattened parameter."""
    number = 0
    for buffer, by_dtype in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        buckets = [bucket for buckets in by_dtype.values() for bucket in buckets]
        kept = {param: ranges["param"] for bucket in buckets for param, ranges in bucket["param_map"].items()}
        for param in buffer.param_index_map:
            if param in kept:
                yield number, (kept[param].start, kept[param].end)
            number += 1


def _pieces(moments: _Moments, ranges: Mapping[int, tuple[int, int]]) -> Iterator[Tensor]:
    """Yield these ranges of the flattened moments, in an order that is the same on every rank."""
    for number, (start, end) in ranges.items():
        for name in sorted(moments[number]):
            yield moments[number][name].view(-1)[start:end]


def _data(value: Any) -> Tensor:
    assert isinstance(value, ShardedBase) and isinstance(value.data, torch.Tensor)
    return value.data
