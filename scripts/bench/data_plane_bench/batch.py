"""The rollout that every plane carries: jagged samples with known values, and their check."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

PUT_TOKEN_COLUMNS = ("input_ids", "response_mask", "generation_logprobs")
PUT_ROW_COLUMNS = ("lengths", "sample_mask")
WRITTEN_COLUMNS = ("prev_logprobs", "reference_logprobs", "advantages")

# What one producer puts and what the stages of a step read, write and read again.
LOGPROB_READS = ("input_ids", "response_mask", "generation_logprobs", "sample_mask")
REFERENCE_READS = ("input_ids", "response_mask")
DRIVER_READS = ("response_mask", "generation_logprobs", "prev_logprobs")
TRAIN_READS = ("input_ids", "response_mask", "prev_logprobs", "reference_logprobs", "sample_mask")

GROUP_SIZE = 16
_VOCABULARY = 150_000


@dataclass(frozen=True, slots=True)
class Shape:
    """``num_rows`` samples, lengths uniform between a quarter of ``max_length`` and ``max_length``."""

    num_rows: int
    max_length: int

    @staticmethod
    def parse(text: str) -> Shape:
        """``512x2048``; raises ValueError."""
        rows, _, length = text.partition("x")
        shape = Shape(int(rows), int(length))
        if shape.num_rows % GROUP_SIZE or shape.num_rows < GROUP_SIZE or shape.max_length < 4:
            raise ValueError(
                f"shape {text!r}: rows must be a multiple of the group size {GROUP_SIZE}, lengths at least 4"
            )
        return shape

    def __str__(self) -> str:
        return f"{self.num_rows}x{self.max_length}"


@dataclass(frozen=True, slots=True)
class Batch:
    """Columns packed: [sum of lengths] per token column, [N] per row column; the same in every process."""

    shape: Shape
    lengths: np.ndarray  # [N] int32
    columns: Mapping[str, np.ndarray]

    @staticmethod
    def make(shape: Shape) -> Batch:
        """Deterministic in the shape."""
        rng = np.random.default_rng(shape.num_rows * 100_003 + shape.max_length)
        lengths = rng.integers(shape.max_length // 4, shape.max_length + 1, shape.num_rows).astype(np.int32)
        num_tokens = int(lengths.sum())
        columns: dict[str, np.ndarray] = {
            "input_ids": rng.integers(0, _VOCABULARY, num_tokens, dtype=np.int32),
            "response_mask": rng.integers(0, 2, num_tokens, dtype=np.uint8),
            "lengths": lengths,
            "sample_mask": rng.integers(0, 2, shape.num_rows).astype(np.float32),
        }
        for name in ("generation_logprobs", *WRITTEN_COLUMNS):
            columns[name] = rng.standard_normal(num_tokens, dtype=np.float32)
        return Batch(shape, lengths, columns)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    def column(self, name: str, rows: Sequence[int]) -> np.ndarray:
        """A column of these rows, one after the other."""
        values = self.columns[name]
        if name in PUT_ROW_COLUMNS:
            return values[np.asarray(rows)]
        bounds = np.concatenate([[0], np.cumsum(self.lengths)])
        return np.concatenate([values[bounds[row] : bounds[row + 1]] for row in rows])

    def check(self, rows: Sequence[int], fetched: Mapping[str, np.ndarray]) -> None:
        """Raises AssertionError when a fetched value is not what was written."""
        for name, values in fetched.items():
            expected = self.column(name, rows)
            if values.shape != expected.shape or not np.array_equal(values, expected):
                raise AssertionError(f"column {name!r}: fetched values differ from those that were written")
