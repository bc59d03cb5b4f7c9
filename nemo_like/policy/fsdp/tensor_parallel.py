"""Tensor parallelism of a transformers model by its own plan, with PyTorch's DTensor styles.

attention and FFN   cut as the model's ``base_model_tp_plan`` says: columns on the way in, rows on the way out
embedding, output   cut by rows of the vocabulary, where it divides evenly; else a copy on every rank
the rest            a copy on every rank, which works on the same activations
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise": RowwiseParallel,
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
# The style of a module of which each rank has a copy that sees only the rank's own heads, so that the copy's
# gradient is a part of a sum.
_SEES_ITS_OWN_HEADS = "replicated_with_grad_allreduce"


@dataclass(frozen=True, slots=True)
class TensorParallelModel:
    """Facts about a model that ``parallelize`` has spread, for its caller."""

    has_vocabulary_shards: bool  # the output layer holds this rank's rows only
    partial_gradients: frozenset[str]  # parameters whose gradients the ranks have to add up


def parallelize(model: PreTrainedModel, mesh: DeviceMesh, group: str) -> TensorParallelModel:
    """Spread the model of the worker group called ``group``, adapters included, over the ranks of a
    one-dimensional mesh, in place.

    Raises ValueError when transformers has no plan for the model, or when the plan has an unsupported style.
    """
    styles: dict[str, ParallelStyle] = {}
    partial: list[str] = []
    for name, style in _module_styles(model, group).items():
        module = model.get_submodule(name)
        if style == _SEES_ITS_OWN_HEADS:
            partial += [f"{name}.{parameter}" for parameter, _ in module.named_parameters()]
        elif style in _STYLES:
            styles |= {f"{name}{part}": _STYLES[style]() for part in _cut_parts(module, style)}
        else:
            raise ValueError(
                f"{model.config.model_type} is cut over ranks in the style {style!r} at {name}, which is not "
                f"supported; set {group}.fsdp_cfg.tensor_parallel_size=1"
            )
    parallelize_module(model, mesh, styles)
    return TensorParallelModel(_cut_vocabulary(model, mesh), frozenset(partial))


def _module_styles(model: PreTrainedModel, group: str) -> dict[str, str]:
    """Return the style of every module that the model's plan covers, except embedding and output layer."""
    plan = model.config.base_model_tp_plan
    if not plan:
        raise ValueError(
            f"transformers has no tensor-parallel plan for {model.config.model_type}; "
            f"set {group}.fsdp_cfg.tensor_parallel_size=1"
        )
    prefix = f"{model.base_model_prefix}."
    patterns = {
        re.compile(re.escape(prefix + pattern).replace(r"\*", r"\d+")): style
        for pattern, style in plan.items()
    }
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    return {
        name: style
        for name, module in model.named_modules()
        for pattern, style in patterns.items()
        if pattern.fullmatch(name) and module not in vocabulary
    }


def _cut_parts(module: nn.Module, style: str) -> list[str]:
    """Return the names of the parts of a planned module that are cut.

    The name is "" for the module itself. A layer with an adapter has W and B cut when the style cuts columns,
    W and A when it cuts rows.
    """
    parts = dict(module.named_children())
    if "base_layer" not in parts:
        return [""]
    adapter = "lora_B" if style.startswith("colwise") else "lora_A"
    return [".base_layer", *(f".{adapter}.{name}" for name, _ in parts[adapter].named_children())]


def _cut_vocabulary(model: PreTrainedModel, mesh: DeviceMesh) -> bool:
    """Cut embedding and output layer by rows of the vocabulary; return whether that was possible."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = output.weight is embedding.weight
    # A subclass of nn.Embedding may do more than look up.
    if type(embedding) is not nn.Embedding or output.weight.shape[0] % mesh.size():
        return False
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate()))
    if is_tied:
        output.weight = embedding.weight
    else:
        parallelize_module(output, mesh, ColwiseParallel())
    return True


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


def sum_gradient(hidden: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return ``hidden`` unchanged; the backward pass sums its gradient over the ranks of ``group``."""
    return _SumGradient.apply(hidden, group)
