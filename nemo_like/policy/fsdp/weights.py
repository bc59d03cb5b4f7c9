"""Moves weights from a checkpoint to sharded parameters and to buffers, and from these back to full tensors
under the checkpoint's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

# The probe's logits may differ by this share of their size, since the checkpoint may be in bfloat16.
_PROBE_TOLERANCE = 0.02
_PROBE_TOKENS = 4


def local_part(full: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's part of a full tensor, cut in the same way as ``parameter``.

    The tensor is first cut over the tensor-parallel ranks, the last axis of the mesh; each of these parts is
    then cut over the data-parallel ranks.
    """
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    for axis in reversed(range(mesh.ndim)):
        placement = parameter.placements[axis]
        if not placement.is_replicate():
            parts = full.chunk(mesh.size(axis), dim=placement.dim)
            has_part = coordinate[axis] < len(parts)
            full = parts[coordinate[axis]] if has_part else full.narrow(placement.dim, 0, 0)
    return full


def full_tensor(parameter: DTensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Gather a whole parameter on ``device`` in ``dtype``; every rank of its mesh takes part."""
    return gathered(parameter.detach().to_local().to(device, dtype), parameter)


def gathered(part: Tensor, parameter: DTensor) -> Tensor:
    """Gather a whole tensor of which this rank has ``part``, cut in the same way as ``parameter``; every rank
    of its mesh takes part."""
    local = DTensor.from_local(
        part,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
    return local.full_tensor()


def stored_buffers(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the buffers that a checkpoint has, by name, such as the biases by which routers choose experts;
    every rank has them whole. Buffers that follow from the configuration are not among them."""
    stored = model.state_dict().keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def hf_tensors(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the checkpoint's tensors, with their names, from which a parameter or a buffer is made:
    transformers fuses some tensors when it loads them."""
    yield from revert_weight_conversion(model, {name: tensor}).items()


@torch.no_grad()
def fill(tensors: Mapping[str, Tensor], source: Mapping[str, Tensor], device: torch.device) -> None:
    """Fill sharded parameters and whole buffers with the values that the first rank has in ``source``, one
    tensor at a time.

    ``source`` is empty on the other ranks.
    """
    for name, tensor in tensors.items():
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        if source:
            full.copy_(source[name])
        dist.broadcast(full, src=0)
        if isinstance(tensor, DTensor):
            tensor.to_local().copy_(local_part(full, tensor))
        else:
            tensor.copy_(full)


@torch.no_grad()
def logit_scale(model: PreTrainedModel, group: str) -> float:
    """Return the factor by which the model of the worker group called ``group`` multiplies hidden @ weight.T
    to get its logits, measured on a few tokens.

    Raises ValueError when the model changes the logits in any other way, such as by adding a bias or capping
    them.
    """
    hidden: list[Tensor] = []
    output = model.get_output_embeddings()
    hook = output.register_forward_pre_hook(lambda module, inputs: hidden.append(inputs[0]))
    logits = model(torch.arange(_PROBE_TOKENS)[None], use_cache=False).logits.double()
    hook.remove()
    plain = torch.nn.functional.linear(hidden[0], output.weight).double()
    scale = float((logits * plain).sum() / plain.square().sum())
    difference = float((logits - scale * plain).norm() / logits.norm())
    if not difference < _PROBE_TOLERANCE or getattr(model.config, "final_logit_softcapping", None):
        raise ValueError(
            f"{type(model).__name__} does not compute its logits as a multiple of hidden states times "
            f"weights, which {group}.backend=fsdp relies on; use a model that does"
        )
    return scale
