"""Finds what Megatron-core's optimizers update: parts or float32 copies of a model's parameters, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from nemo_like.cluster.coordinates import Coordinates
from nemo_like.policy.loss.update_watch import WeightCopies
from nemo_like.policy.loss.updated_tensors import UpdatedTensor, is_matrix
from nemo_like.policy.megatron.optimizer import chained_optimizers

# Pairs of attributes with lists, by parameter group, of a model's parameters and of what is updated for them.
_HELD_FOR = (
    ("model_fp32_groups", "shard_fp32_groups"),
    ("model_float16_groups", "shard_fp32_from_float16_groups"),
    ("float16_groups", "fp32_from_float16_groups"),
)


def updated_tensors(
    optimizer: MegatronOptimizer, named: Iterable[tuple[str, Tensor]]
) -> Iterator[UpdatedTensor]:
    """Yield what the optimizer updates on this rank; ``named`` are the model's parameters.

    An optimizer on the host is left out: its weights and moments are copies that it makes itself.
    """
    names = {id(parameter): name for name, parameter in named}
    for part in chained_optimizers(optimizer):
        if part.is_stub_optimizer or isinstance(part.optimizer, HybridDeviceOptimizer):
            continue
        originals = dict(_originals(part))
        for group in part.optimizer.param_groups:
            for held in group["params"]:
                parameter = originals.get(id(held), held)
                name = names.get(id(parameter), "a tensor without a name")
                yield UpdatedTensor(
                    name=name,
                    weight=held.detach(),
                    is_matrix=is_matrix(name, parameter),
                    group=group,
                    state=part.optimizer.state.get(held, {}),
                )


def _originals(part: MegatronOptimizer) -> Iterator[tuple[int, Tensor]]:
    """Yield, by the identity of each tensor that is updated for a model's parameter, that parameter."""
    for model_side, held_side in _HELD_FOR:
        for parameters, held in zip(getattr(part, model_side, ()), getattr(part, held_side, ()), strict=True):
            yield from ((id(one), parameter) for parameter, one in zip(parameters, held, strict=True))


def weight_copies(
    named: Iterable[tuple[str, torch.nn.Parameter]], coordinates: Coordinates
) -> list[WeightCopies]:
    """Return a stage's weights by the ranks that have copies of them.

    They are, of experts, the ranks with one place among those that hold all experts; of other weights those
    with one tensor-parallel place; and of weights that tensor parallelism does not cut, all of the stage.
    """
    layout, first = coordinates.layout, coordinates.pp * coordinates.layout.stage_size
    experts: list[tuple[str, Tensor]] = []
    others: list[tuple[str, Tensor]] = []
    whole: list[tuple[str, Tensor]] = []
    for name, parameter in named:
        is_cut = getattr(parameter, "tensor_model_parallel", False) or "adapters" in name
        # By their names, or as adapters of experts by Megatron-core's mark.
        is_of_experts = ".experts." in name or not getattr(parameter, "allreduce", True)
        (experts if is_of_experts else others).append((name, parameter.detach()))
        if not (is_cut or is_of_experts):
            whole.append((name, parameter.detach()))
    return [
        WeightCopies(first + coordinates.tp, others),
        WeightCopies(first + coordinates.rank % layout.stage_size % layout.expert_ranks, experts),
        WeightCopies(first, whole, are_computed_apart=True),
    ]
