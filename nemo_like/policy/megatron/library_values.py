"""Values of Megatron-core's own arguments, which YAML has no words for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any, get_args, get_type_hints

import torch


def as_megatron_has_them(kind: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of one of Megatron-core's dataclasses with the names of enumerations and of dtypes as
    what they name: ``attention_backend: flash``, ``exp_avg_dtype: bfloat16``.

    Raises ValueError for an argument that ``kind`` does not have, and for a name that stands for nothing.
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
