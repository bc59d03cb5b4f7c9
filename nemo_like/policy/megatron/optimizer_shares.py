"""The moments of an optimizer that is sharded over data-parallel ranks, while a checkpoint is read.

A checkpoint has three float32 tensors per parameter: the parameter and its two moments. Megatron-core has
every rank read all of them, of which it keeps its own part. Here the first rank of each data-parallel group
reads, and sends each other rank what that rank keeps, so that a node's memory holds them once, and not once
for each of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedStateDict
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nemo_like.policy.megatron.optimizer import chain

# By the parameter's place in the order in which Megatron-core numbers them: its tensors by name.
_Moments = dict[int, dict[str, Tensor]]
_STATE = "param_state"


class UntouchedZeros(TorchFunctionMode):
    """In this context ``torch.zeros`` on the CPU takes no memory until something is written there, or read.

    Megatron-core makes room for a whole optimizer on every rank, also where a part of it is wanted.
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
    """What this rank keeps of the moments of one optimizer."""

    def __init__(self, optimizer: DistributedOptimizer, wanted: ShardedStateDict) -> None:
        """``wanted`` is the state of ``optimizer`` that is about to be loaded. Where this rank does not read,
        its moments are taken out; memory for them is used as far as something is written there."""
        self._group = optimizer.data_parallel_group_gloo
        self._is_reader = dist.get_rank(self._group) == 0
        self._ranges = dict(_own_ranges(optimizer))
        self._moments: _Moments = {}
        if not self._is_reader:
            self._moments = {
                place: {name: _data(value) for name, value in tensors.items()}
                for place, tensors in wanted.pop(_STATE).items()
            }

    def complete(self, state: dict[str, Any]) -> None:
        """Complete ``state``, which was loaded, on every rank of the group, all of which call this."""
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
    """Return the optimizers of a chain that are sharded, by their key in the chain's state. The key is None
    where there is but one, whose state is the chain's."""
    parts = chain(optimizer)
    keys = range(len(parts)) if len(parts) > 1 else [None]
    return {
        key: part for key, part in zip(keys, parts, strict=True) if isinstance(part, DistributedOptimizer)
    }


def _own_ranges(optimizer: DistributedOptimizer) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield where a parameter is in the order, and from where to where this rank keeps it, flattened."""
    place = 0
    for buffer, by_dtype in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        buckets = [bucket for buckets in by_dtype.values() for bucket in buckets]
        kept = {param: ranges["param"] for bucket in buckets for param, ranges in bucket["param_map"].items()}
        for param in buffer.param_index_map:
            if param in kept:
                yield place, (kept[param].start, kept[param].end)
            place += 1


def _pieces(moments: _Moments, ranges: Mapping[int, tuple[int, int]]) -> Iterator[Tensor]:
    """Yield the parts of flattened moments in these ranges, in an order that is the same on every rank."""
    for place, (start, end) in ranges.items():
        for name in sorted(moments[place]):
            yield moments[place][name].view(-1)[start:end]


def _data(value: Any) -> Tensor:
    assert isinstance(value, ShardedBase) and isinstance(value.data, torch.Tensor)
    return value.data
