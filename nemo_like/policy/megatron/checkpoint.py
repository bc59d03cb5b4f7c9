"""Weights and optimizer in checkpoints of Megatron-core's ``torch_dist`` format, which any layout can read.

Every tensor is stored under its place in the whole model, so that a run whose checkpoint was written by
TP2 x DP2 can resume under PP2. An optimizer that is sharded over data-parallel ranks is brought into the same
form ("fully reshardable") while it is saved.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedStateDict, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from nemo_like.policy.checkpoint_writer import CheckpointWriter

_FORMAT = ("torch_dist", 1)
_IS_SHARDED = "optimizer_is_sharded"
_METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


class _InProcessSave(torch_strategies.TorchDistSaveShardedStrategy):
    """A save strategy that writes in this process. Megatron-core's own starts two further processes per rank,
    which outlive a rank that is killed."""

    def __init__(self, writer: CheckpointWriter) -> None:
        super().__init__(*_FORMAT)
        self._writer = writer

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        state, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        for part in (part for parts in state.values() for part in parts):
            if isinstance(part, ShardedTensor):
                part.data = self._writer.copied(part.data)
            elif isinstance(part, ShardedObject):
                part.data = deepcopy(part.data)
        self._writer.write(
            torch_strategies.mcore_to_pyt_state_dict(state, False),
            checkpoint_dir,
            torch_strategies.MCoreSavePlanner(
                dedup_replicated_tensors=not self.keep_only_main_replica, flatten_state_dict=False
            ),
        )


def save_checkpoint(
    path: Path,
    model: torch.nn.Module,
    optimizer: MegatronOptimizer,
    counters: dict[str, int],
    writer: CheckpointWriter,
) -> None:
    """Hand this rank's part to ``writer``, which writes it into the empty directory ``path``; every rank
    calls this with equal ``counters``."""
    state = {**_sharded_state(model, optimizer, is_loading=False), **counters}
    state[_IS_SHARDED] = _is_sharded(optimizer)
    dist_checkpointing.save(state, str(path), _InProcessSave(writer), content_metadata=_METADATA)


def load_checkpoint(path: Path, model: torch.nn.Module, optimizer: MegatronOptimizer) -> dict[str, int]:
    """Read this rank's part into model and optimizer, whatever layout wrote it; return the counters.

    Raises ValueError when the checkpoint's optimizer is sharded and this one is not, or the reverse.
    """
    was_sharded = dist_checkpointing.load_common_state_dict(str(path))[_IS_SHARDED]
    if was_sharded != _is_sharded(optimizer):
        raise ValueError(
            f"the checkpoint {path} was saved with policy.megatron_cfg.use_distributed_optimizer="
            f"{str(was_sharded).lower()}; resume it with the same setting"
        )
    wanted = _sharded_state(model, optimizer, is_loading=True)
    state = dist_checkpointing.load(wanted, str(path))
    model.load_state_dict(state.pop("model"))
    optimizer.load_state_dict(state.pop("optimizer"))
    return {name: value for name, value in state.items() if isinstance(value, int)}


def _is_sharded(optimizer: MegatronOptimizer) -> bool:
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return any(isinstance(part, DistributedOptimizer) for part in parts)


def _sharded_state(
    model: torch.nn.Module, optimizer: MegatronOptimizer, *, is_loading: bool
) -> ShardedStateDict:
    weights: Any = model.sharded_state_dict()
    moments = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=_METADATA)
    return {"model": weights, "optimizer": moments}
