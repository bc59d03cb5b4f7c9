"""Where a policy computes, and in which numbers."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch

from nemo_like.config.schema import Device, Precision

_T = TypeVar("_T")

DTYPES = {Precision.float32: torch.float32, Precision.bfloat16: torch.bfloat16}


def compute_device(device: Device) -> torch.device:
    """This process's: the host, or the CUDA device that is current."""
    if device is Device.cpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def on_device(holder: _T, device: torch.device) -> _T:
    """A copy of a dataclass with its tensors there; what else it holds stays as it is."""
    record: Any = holder
    values = {one.name: getattr(record, one.name) for one in fields(record)}
    moved = {
        name: value.to(device, non_blocking=True)
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    copy: _T = replace(record, **moved)
    return copy
