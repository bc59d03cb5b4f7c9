"""Finds the matrices that Muon updates in a model of transformers: those of its layers' linear layers, as the
model's checkpoint has them, where each expert's matrices are their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from nemo_like.policy.backends.muon import WholeMatrices, of_stacked
from nemo_like.policy.fsdp.weights import hf_tensors
from nemo_like.policy.loss.updated_tensors import is_matrix


def layer_matrices(model: PreTrainedModel, names: Iterable[str], group: str) -> dict[str, WholeMatrices]:
    """Return what finds the matrices in each of the model's parameters ``names`` that has any; the model's
    layers are FSDP units already.

    Raises ValueError for the worker group called ``group`` when the model has no layers that FSDP knows, or
    keeps experts in a way that does not show their matrices.
    """
    layers = (name for name, module in model.named_modules() if isinstance(module, FSDPModule))
    prefixes = tuple(f"{name}." for name in layers)
    if not prefixes:
        raise ValueError(
            f"{type(model).__name__} does not say which of its modules are layers (_no_split_modules), so "
            f"{group}.optimizer.kind=muon finds no matrices; set it to adamw"
        )
    found: dict[str, WholeMatrices] = {}
    for name in names:
        parameter = model.get_parameter(name)
        if not name.startswith(prefixes) or not is_matrix(name, parameter):
            continue
        if parameter.dim() == 2:
            found[name] = _single
        elif parameter.dim() == 3 and ".experts." in name:
            found[name] = partial(_stacked, num_blocks=_num_blocks(model, name, parameter.shape, group))
    return found


def _single(whole: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    return function(whole)


def _stacked(whole: Tensor, function: Callable[[Tensor], Tensor], *, num_blocks: int) -> Tensor:
    return of_stacked(whole, num_blocks, function)


def _num_blocks(model: PreTrainedModel, name: str, shape: torch.Size, group: str) -> int:
    """Return how many matrices of its checkpoint each expert has in a stack of experts."""
    parts = [part.shape for _, part in hf_tensors(model, name, torch.empty(shape, device="meta"))]
    if parts == [shape]:
        return 1
    num_experts, rows, columns = shape
    num_blocks = len(parts) // num_experts
    if set(parts) != {(rows // num_blocks, columns)}:
        raise ValueError(
            f"{name} of {type(model).__name__} stacks experts in a way that {group}.optimizer.kind=muon "
            "cannot take apart; set it to adamw"
        )
    return num_blocks
