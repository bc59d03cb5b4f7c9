"""Weights and optimizer in checkpoints of Megatron-core's ``torch_dist`` format, which any layout can read.

Every tensor is stored under its place in the whole model, so that a run whose checkpoint was written by TP2 x
DP2 can resume under PP2. An optimizer that is sharded over data-parallel ranks is brought into the same form
("fully reshardable") on the first rank of each data-parallel group. While a checkpoint is saved, the other
ranks of the group send it their parts; while one is loaded, it sends each rank its part.

With expert parallelism Megatron-core chains two optimizers, one of them for the experts. Their tensors are
stored without a number in front, so that a single optimizer finds them too. An optimizer's parameter groups
are stored in the chain's order. Where the loading run's chain has another length, its parameter groups come
from the configuration, and only their count of steps is taken from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import (
    ShardedBase,
    ShardedObject,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
)
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from megatron.core.optimizer import MegatronOptimizer

from nemo_like.policy.backends.kept_weights import KeptWeights
from nemo_like.policy.backends.muon import check_kind
from nemo_like.policy.megatron.optimizer import chained_optimizers, ensure_state, kind_of
from nemo_like.policy.megatron.optimizer_shares import (
    OptimizerShares,
    UntouchedZeros,
    places_in_gathered_tensors,
    sharded_parts,
)
from nemo_like.policy.options import OptimizerKind
from nemo_like.policy.workers.checkpoint_writer import CheckpointWriter

_FORMAT = ("torch_dist", 1)
_REFERENCE = "reference"
_IS_SHARDED = "optimizer_is_sharded"
_KIND = "optimizer_kind"
_MOMENTS = "optimizer.state."  # how the names of an optimizer's tensors begin
_UNNUMBERED = "chained_optim_avoid_prefix"
_METADATA = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "distrib_optim_fully_reshardable_mem_efficient": True,
    _UNNUMBERED: True,
}


class _InProcessSave(torch_strategies.TorchDistSaveShardedStrategy):
    """A save strategy that writes in this process. Megatron-core's own strategy starts two further processes
    per rank, which outlive a rank that is killed."""

    def __init__(self, writer: CheckpointWriter, *, are_gathered: bool) -> None:
        """Keep ``writer``. ``are_gathered`` says that the moments are gathered copies, which nobody will
        change."""
        super().__init__(*_FORMAT)
        self._writer, self._are_gathered = writer, are_gathered

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        state, _, _ = torch_strategies._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        for part in (part for parts in state.values() for part in parts):
            if isinstance(part, ShardedTensor) and not (self._are_gathered and part.key.startswith(_MOMENTS)):
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
    counters: Mapping[str, float],
    writer: CheckpointWriter,
    reference: KeptWeights | None,
) -> None:
    """Give this rank's part to ``writer``, which writes it into the empty directory ``path``; every rank
    calls this with equal ``counters``. With ``reference`` its weights are written beside the model's."""
    ensure_state(optimizer)  # a checkpoint without moments could not be loaded
    with places_in_gathered_tensors(optimizer):
        state = {**_sharded_state(model, optimizer, _METADATA, is_loading=False), **counters}
    if reference is not None:
        with reference.in_model():
            state[_REFERENCE] = _copied(model.sharded_state_dict(prefix=f"{_REFERENCE}."))
    state[_IS_SHARDED], state[_KIND] = bool(sharded_parts(optimizer)), kind_of(optimizer).value
    strategy = _InProcessSave(writer, are_gathered=state[_IS_SHARDED])
    dist_checkpointing.save(state, str(path), strategy, content_metadata=_METADATA)


def load_reference(path: Path, model: torch.nn.Module, reference: KeptWeights) -> bool:
    """Read the reference's weights through ``model``, which loses its own; return whether the checkpoint has
    any. Every rank calls this."""
    wanted = {_REFERENCE: model.sharded_state_dict(prefix=f"{_REFERENCE}.")}
    stored = dist_checkpointing.load_tensors_metadata(str(path))
    if not any(name.startswith(f"{_REFERENCE}.") for name in stored):
        return False
    state = dist_checkpointing.load(wanted, str(path))[_REFERENCE]
    model.load_state_dict({name.removeprefix(f"{_REFERENCE}."): value for name, value in state.items()})
    reference.take()
    return True


def load_stored_weights(path: Path, model: torch.nn.Module, optimizer: MegatronOptimizer) -> None:
    """Read this rank's part of the weights alone into the model, and into the optimizer's copies of them. Any
    layout may have written the checkpoint."""
    state = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(path))
    model.load_state_dict(state["model"])
    optimizer.reload_model_params()


def load_checkpoint(
    path: Path, model: torch.nn.Module, optimizer: MegatronOptimizer, group: str
) -> dict[str, float]:
    """Read this rank's part into model and optimizer of the worker group called ``group``; return the
    counters. Any layout may have written the checkpoint.

    Raises ValueError when exactly one of the checkpoint's optimizer and this one is sharded, or is Muon. Also
    raises ValueError for a checkpoint from before the chained optimizers shared their tensors' names, when
    this chain has another length.
    """
    common = dist_checkpointing.load_common_state_dict(str(path))
    stored = OptimizerKind(common.get(_KIND, OptimizerKind.adamw.value))  # which older checkpoints do not say
    check_kind(path, stored, kind_of(optimizer), group)
    was_sharded = common[_IS_SHARDED]
    if was_sharded != bool(sharded_parts(optimizer)):
        raise ValueError(
            f"the checkpoint {path} was saved with {group}.megatron_cfg.use_distributed_optimizer="
            f"{str(was_sharded).lower()}; resume it with the same setting"
        )
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or _METADATA
    is_rearranged = _chain_length(common["optimizer"]) != len(chained_optimizers(optimizer))
    if is_rearranged:
        if not metadata.get(_UNNUMBERED):
            raise ValueError(
                f"the checkpoint {path} was saved by an older version, whose optimizers do not fit another "
                f"{group}.megatron_cfg.expert_model_parallel_size; resume it with the same one, or start a "
                "new run from its weights (scripts/convert_checkpoint.py)"
            )
        _set_steps(optimizer, max(_steps(common["optimizer"]), default=0))
    with UntouchedZeros():
        wanted = _sharded_state(model, optimizer, metadata, is_loading=True)
    shares = {
        key: OptimizerShares(part, wanted["optimizer"] if key is None else wanted["optimizer"][key])
        for key, part in sharded_parts(optimizer).items()
    }
    own = _without_sharded(wanted["optimizer"])
    state = dist_checkpointing.load(wanted, str(path))
    model.load_state_dict(state.pop("model"))
    moments = state.pop("optimizer")
    if is_rearranged:
        moments = {key: _completed(moments.get(key), value) for key, value in own.items()}
    for key, share in shares.items():
        share.complete(moments if key is None else moments[key])
    optimizer.load_state_dict(moments)
    return {name: value for name, value in state.items() if isinstance(value, int | float)}


def _sharded_state(
    model: torch.nn.Module, optimizer: MegatronOptimizer, metadata: Mapping[str, Any], *, is_loading: bool
) -> ShardedStateDict:
    weights: Any = model.sharded_state_dict()
    moments = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=dict(metadata))
    return {"model": weights, "optimizer": moments}


def _copied(state: Any) -> Any:
    """Return a nested state whose tensors are copies on the host."""
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, ShardedTensor | ShardedTensorFactory):
        return replace(state, data=state.data.detach().to("cpu", copy=True))
    return state


def _chain_length(stored: Mapping[Any, Any]) -> int:
    """Return how many optimizers a checkpoint's state has: the states in a chain have numbers as keys."""
    return sum(isinstance(key, int) for key in stored) or 1


def _steps(stored: Any) -> Iterator[int]:
    """Yield the step counts of all parameter groups in a checkpoint's state."""
    if isinstance(stored, Mapping):
        for group in stored.get("param_groups", ()):
            if "step" in group:
                yield int(group["step"])
        for value in stored.values():
            yield from _steps(value)


def _set_steps(optimizer: MegatronOptimizer, num_steps: int) -> None:
    for part in chained_optimizers(optimizer):
        if not part.is_stub_optimizer:
            for group in part.optimizer.param_groups:
                group["step"] = num_steps


def _without_sharded(state: Any) -> Any:
    """Return a copy of a nested state without its sharded tensors and objects."""
    if isinstance(state, Mapping):
        return {
            key: _without_sharded(value) for key, value in state.items() if not isinstance(value, ShardedBase)
        }
    if isinstance(state, list):
        return [_without_sharded(value) for value in state]
    return state


def _completed(state: Any, own: Any) -> Any:
    """Return ``state`` with the entries of ``own`` that it lacks."""
    if state is None:
        return own
    if isinstance(own, Mapping) and isinstance(state, Mapping):
        return {**state, **{key: _completed(state.get(key), value) for key, value in own.items()}}
    if isinstance(own, list) and isinstance(state, list):
        return [_completed(value, mine) for value, mine in zip(state, own, strict=True)]
    return state
