"""Random batches with columns of every kind that a GRPO step or a user's environment may carry."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from nemo_like.batch.columns import Column, Layout

DTYPES = ("int64", "int32", "uint8", "bool", "float32", "float16", "bfloat16")


@dataclass(frozen=True)
class Kind:
    """A way to fill a column: ``fill(rng, lengths)`` gives the values of a batch, with a length per sample;
    where the column is per prompt, per prompt."""

    name: str
    layout: Layout
    dtype: str = ""
    inner_shape: tuple[int, ...] = ()
    per_prompt: bool = False

    @property
    def column(self) -> Column:
        return Column(self.name, self.dtype, self.layout, "", self.inner_shape, self.per_prompt)

    def fill(self, rng: np.random.Generator, lengths: list[int]) -> Any:
        if self.layout is Layout.per_token:
            return dense(rng, self.dtype, (sum(lengths), *self.inner_shape))
        if self.layout is Layout.per_sample:
            return dense(rng, self.dtype, (len(lengths), *self.inner_shape))
        if self.layout is Layout.ragged:
            return [images(rng) for _ in lengths]
        return [message_log(rng, length) for length in lengths]


KINDS = (
    *(Kind(f"tokens of {dtype}", Layout.per_token, dtype) for dtype in DTYPES),
    *(Kind(f"scalars of {dtype}", Layout.per_sample, dtype) for dtype in DTYPES),
    Kind("routed experts", Layout.per_token, "int32", (3, 2)),
    Kind("hidden states", Layout.per_token, "bfloat16", (4,)),
    Kind("fixed shape", Layout.per_sample, "float32", (2, 3)),
    Kind("nothing in it", Layout.per_sample, "float32", (0,)),
    Kind("multimodal inputs", Layout.ragged),
    Kind("message logs", Layout.objects),
    Kind("levels", Layout.per_sample, "float32", (2,), per_prompt=True),
    Kind("codes", Layout.per_sample, "bfloat16", per_prompt=True),
    Kind("pictures of the prompt", Layout.ragged, per_prompt=True),
    Kind("notes of the prompt", Layout.objects, per_prompt=True),
)


def dense(rng: np.random.Generator, dtype: str, shape: tuple[int, ...]) -> Any:
    """Any bits that the dtype has, NaN and infinities included."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "bfloat16":
        bits = rng.integers(-(2**15), 2**15, shape, dtype=np.int16)
        return torch.from_numpy(bits).view(torch.bfloat16)
    size = np.dtype(dtype).itemsize * math.prod(shape)
    return np.frombuffer(rng.bytes(size), dtype).reshape(shape)


def images(rng: np.random.Generator) -> list[Any]:
    """Up to three tensors of different shapes and dtypes, some empty, some without dimensions."""
    chosen = rng.choice(DTYPES, size=rng.integers(0, 4))
    tensors = [dense(rng, str(dtype), tuple(rng.integers(0, 4, rng.integers(0, 4)))) for dtype in chosen]
    return [
        torch.from_numpy(t.copy()) if isinstance(t, np.ndarray) and rng.random() < 0.3 else t for t in tensors
    ]


def message_log(rng: np.random.Generator, length: int) -> Any:
    """Nested, with text, arrays of any length, None and floats."""
    log = [
        {"role": "user", "content": "é" * length, "token_ids": rng.integers(0, 9, length)},
        {"role": "tool", "content": None, "score": float(rng.random()), "parts": [("x", b"\x00"), {}]},
    ]
    return log[: rng.integers(0, 3)]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], dict[Kind, Any]]:
    """(lengths, chunk sizes, values by kind)."""
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    cut = draw(st.integers(1, len(lengths)))
    chunk_sizes = [cut] if cut == len(lengths) else [cut, len(lengths) - cut]
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=5, unique=True))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    return (
        lengths,
        chunk_sizes,
        {kind: kind.fill(rng, chunk_sizes if kind.per_prompt else lengths) for kind in kinds},
    )


def rows(kind: Kind, values: Any, lengths: Sequence[int], prompt_index: Sequence[int]) -> list[Any]:
    """A batch's values, one entry per sample."""
    if kind.per_prompt:
        return [values[prompt] for prompt in prompt_index]
    if kind.layout is Layout.per_token:
        bounds = itertools.accumulate(lengths, initial=0)
        return [values[start:stop] for start, stop in itertools.pairwise(bounds)]
    return list(values)


def frozen(value: Any) -> Any:
    """A value in a form whose equality is: same types, dtypes, shapes and bits."""
    if isinstance(value, torch.Tensor):
        bits = value.contiguous().reshape(-1).view(torch.uint8) if value.numel() else value
        return ("tensor", value.dtype, tuple(value.shape), bits.tolist())
    if isinstance(value, np.ndarray | np.generic):
        return ("array", value.dtype, value.shape, np.asarray(value).tobytes())
    if isinstance(value, dict):
        return ("dict", [(key, frozen(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return (type(value), [frozen(item) for item in value])
    return (type(value), value)
