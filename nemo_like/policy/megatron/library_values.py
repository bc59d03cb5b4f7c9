"""Turns texts of a configuration into values of Megatron-core's arguments that YAML cannot write."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any, get_args, get_type_hints

import torch


def megatron_values(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments for the Megatron-core dataclass ``kind``, with names of enumeration members and dtypes
    replaced by the members and dtypes: ``attention_backend: flash``, ``exp_avg_dtype: bfloat16``.

    Raises ValueError for an argument that ``kind`` does not have, and for an unknown name.
    """
    if not arguments:
        return {}
    hints, names = get_type_hints(kind), {field.name for field in dataclasses.fields(kind)}
    if unknown := arguments.keys() - names:
        raise ValueError(f"{kind.__name__} has no {', '.join(sorted(unknown))}")
    return {name: _value(name, hints[name], value) for name, value in arguments.items()}


def _value(name: str, hint: Any, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    for kind in (hint, *get_args(hint)):
        if isinstance(kind, type) and issubclass(kind, Enum):
            if value not in kind.__members__:
                raise ValueError(f"{name}={value} is none of {', '.join(kind.__members__)}")
            return kind[value]
        if kind is torch.dtype:
            if not isinstance(dtype := getattr(torch, value, None), torch.dtype):
                raise ValueError(f"{name}={value} is no dtype of PyTorch, such as bfloat16")
            return dtype
    return value
