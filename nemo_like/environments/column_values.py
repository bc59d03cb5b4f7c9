"""Converts a column's value, from a record or an environment, into the form that the data plane stores."""

from __future__ import annotations

from typing import Any

import numpy as np

from nemo_like.batch.columns import DTYPES, Column, Layout
from nemo_like.data_plane.storage_errors import ColumnMismatch


class NotFinite(ColumnMismatch):
    """A value is NaN, infinite or too large for the column's dtype."""


def column_value(column: Column, value: Any, num_tokens: int) -> Any:
    """Convert one value to the column's dtype and shape.

    Python's numbers and lists and numpy's arrays become arrays, [num_tokens, *inner_shape] per token and
    [*inner_shape] otherwise. A ragged value becomes a list of arrays or torch tensors in their own dtypes; an
    object stays as it is. Floats are rounded to the dtype.

    Raises ColumnMismatch for a value of another shape, or a value that the dtype cannot hold, as integers
    cannot hold a fraction; NotFinite for a value that is not finite, or too large for the dtype.
    """
    if column.layout is Layout.objects:
        return value
    if column.layout is Layout.ragged:
        if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
            raise ColumnMismatch(f"column {column.name!r} takes a list of arrays, not {_shown(value)}")
        return [_ragged(column, one) for one in value]
    array = _cast(column, _array(column, value))
    expected = (num_tokens, *column.inner_shape) if column.layout is Layout.per_token else column.inner_shape
    if array.shape != expected:
        per = f" for {num_tokens} tokens" if column.layout is Layout.per_token else ""
        raise ColumnMismatch(
            f"column {column.name!r} has shape {list(array.shape)}, where {list(expected)} is declared{per}"
        )
    if not np.isfinite(array).all():
        raise NotFinite(f"column {column.name!r} has values that are not finite in {column.dtype}")
    return array


def nothing(column: Column, num_tokens: int) -> Any:
    """Return the value of a column that was not given one: zeros; an empty list if ragged; None for an
    object."""
    if column.layout is Layout.objects:
        return None
    if column.layout is Layout.ragged:
        return []
    shape = (num_tokens, *column.inner_shape) if column.layout is Layout.per_token else column.inner_shape
    return np.zeros(shape, column.dtype)


def _ragged(column: Column, value: Any) -> Any:
    """Convert a value to an array, or keep a torch tensor; raise ColumnMismatch for a dtype that columns do
    not have."""
    tensor = value if type(value).__module__.startswith("torch") else _array(column, value)
    dtype = str(tensor.dtype).removeprefix("torch.")
    if isinstance(tensor, np.ndarray) and not tensor.dtype.isnative:
        tensor = tensor.astype(tensor.dtype.newbyteorder("="))
        dtype = str(tensor.dtype)
    if dtype not in DTYPES:
        raise ColumnMismatch(f"column {column.name!r} takes arrays of {', '.join(DTYPES)}, not of {dtype}")
    is_finite = np.isfinite(tensor) if isinstance(tensor, np.ndarray) else tensor.isfinite()
    if not is_finite.all():
        raise NotFinite(f"column {column.name!r} has values that are not finite")
    return tensor


def _array(column: Column, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ColumnMismatch(f"column {column.name!r}: {_shown(value)} is no array: {error}") from error
    if array.dtype.kind not in "biufc":
        raise ColumnMismatch(f"column {column.name!r}: {_shown(value)} is no array of numbers")
    return array


def _cast(column: Column, array: np.ndarray) -> np.ndarray:
    dtype = np.dtype(column.dtype)
    if array.dtype == dtype:
        return array
    is_exact = dtype.kind in "biu"
    if not is_exact and not np.can_cast(array.dtype, dtype, "same_kind"):
        raise ColumnMismatch(
            f"column {column.name!r} is declared {dtype}, and {array.dtype} is no such number"
        )
    with np.errstate(all="ignore"):
        cast = array.astype(dtype)
    if is_exact and not np.array_equal(cast, array):
        raise ColumnMismatch(f"column {column.name!r} is declared {dtype}, which cannot hold {_shown(array)}")
    return cast


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:80] + "..."
