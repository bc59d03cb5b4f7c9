"""The columns that a teacher writes, because the loss reads them. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_like.batch.columns import (
    INPUT_IDS,
    RESPONSE_MASK,
    TEACHER_LOGPROBS,
    TEACHER_TOPK_IDS,
    TEACHER_TOPK_LOGPROBS,
    Column,
    ColumnError,
    Declaration,
)

_NAMES = (TEACHER_LOGPROBS.name, TEACHER_TOPK_IDS, TEACHER_TOPK_LOGPROBS)


def teacher_columns(reads: Sequence[Column]) -> tuple[Column, ...]:
    """Return the columns among ``reads``, the columns that the loss reads, that a teacher writes.

    Raises ColumnError when there are none.
    """
    columns = tuple(column for column in reads if column.name in _NAMES)
    if not columns:
        raise ColumnError(
            f"the loss reads no column of a teacher ({', '.join(_NAMES)}); leave the group teacher out, or "
            "declare by @reads what the loss compares with"
        )
    return columns


def num_most_likely(columns: Sequence[Column]) -> int:
    """Return how many of the teacher's most likely tokens ``columns`` hold for each token; 0 when they hold
    none."""
    of_several = (column for column in columns if column.name in (TEACHER_TOPK_IDS, TEACHER_TOPK_LOGPROBS))
    return max((column.inner_shape[0] for column in of_several), default=0)


def scores_by_column(
    columns: Sequence[Column], *, logprobs: Any, topk_ids: Any, topk_logprobs: Any
) -> dict[Column, Any]:
    """Return for each column the teacher's scores that it holds."""
    scores = {
        TEACHER_LOGPROBS.name: logprobs,
        TEACHER_TOPK_IDS: topk_ids,
        TEACHER_TOPK_LOGPROBS: topk_logprobs,
    }
    return {column: scores[column.name] for column in columns}


def teacher_declaration(columns: Sequence[Column], inputs: Sequence[Column] = ()) -> Declaration:
    """Return the declaration of a teacher that writes ``columns``, and reads ``inputs`` besides tokens."""
    return Declaration("teacher", writes=tuple(columns), reads=(INPUT_IDS, RESPONSE_MASK, *inputs))
