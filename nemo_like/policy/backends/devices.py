"""The device on which a worker computes, and the dtype of each configured precision."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

import torch

from nemo_like.policy.options import Device, Precision

_T = TypeVar("_T")

DTYPES: dict[Precision, torch.dtype] = {one: getattr(torch, one.value) for one in Precision}


def compute_device(device: Device) -> torch.device:
    """Return the device on which this process computes: the CPU, or the current CUDA device."""
    if device is Device.cpu:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def on_device(holder: _T, device: torch.device) -> _T:
    """Return a copy of a dataclass with all its tensors on ``device``, also in dataclasses and tuples of them
    among its fields; other fields stay as they are."""
    record: Any = holder
    moved: dict[str, Any] = {}
    for name in (one.name for one in fields(record)):
        value = getattr(record, name)
        if isinstance(value, torch.Tensor):
            moved[name] = value.to(device, non_blocking=True)
        elif isinstance(value, tuple) and value and is_dataclass(value[0]):
            moved[name] = tuple(on_device(one, device) for one in value)
        elif is_dataclass(value):
            moved[name] = on_device(value, device)
    copy: _T = replace(record, **moved)
    return copy
