"""The codec turns a column's values into contiguous numpy arrays and back; no other module knows their bytes.

Dense columns (per_token, per_sample) are one array already, and stay as they are.
A ragged or objects column becomes one uint8 array: the number of rows, the rows' offsets, then each row by
itself, so that one row can be read without touching the others. All header numbers are int64, and the values
after them are aligned to ``_ALIGN`` bytes.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nemo_like.batch.columns import DTYPES, Column, Layout
from nemo_like.data_plane.storage_errors import ColumnMismatch

_ALIGN = 16
_INT = np.dtype(np.int64)
_DTYPE_CODES = {name: code for code, name in enumerate(DTYPES)}
_NUMPY, _TORCH = 0, 1


def wire_dtype(column: Column) -> np.dtype:
    """Return the dtype that the column's array has in storage."""
    if not column.is_dense:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if column.dtype == "bfloat16" else column.dtype)


def wire_shape(column: Column, lengths: Sequence[int], num_prompts: int) -> tuple[int, ...]:
    """Return the shape of the one array that has a dense column's values of all samples.

    ``lengths`` are the samples' tokens; a column with one value per prompt has ``num_prompts`` rows."""
    num_values = num_prompts if column.per_prompt else len(lengths)
    return (sum(lengths) if column.layout is Layout.per_token else num_values, *column.inner_shape)


def alignment(column: Column) -> int:
    """Return the number of bytes to which the beginning of the column's array must be aligned."""
    return wire_dtype(column).itemsize if column.is_dense else _ALIGN


def whole_to_wire(
    column: Column, values: Any, *, lengths: Sequence[int], num_prompts: int, partition: str
) -> np.ndarray:
    """Turn one column of a batch, of any layout, into one array; ``whole_from_wire`` turns it back.

    Raises ColumnMismatch when dtype, shape or count differ from the declaration.
    """
    wired = to_wire(column, values, lengths=lengths, num_prompts=num_prompts, partition=partition)
    return wired if column.is_dense else pack_rows(column, wired)


def whole_from_wire(column: Column, array: np.ndarray) -> Any:
    """Return the batch that ``whole_to_wire`` turned into ``array``, as ``DataPlane.fetch`` would.

    Raises ColumnMismatch when a ragged or objects column's bytes were cut short.
    """
    if column.is_dense:
        return from_wire(column, array)
    num_rows = num_packed_rows(array)
    if num_rows < 0:
        raise ColumnMismatch(f"column {column.name!r}: its {array.nbytes} bytes are no packed rows")
    return [unpack_row(column, array, row) for row in range(num_rows)]


def to_wire(column: Column, values: Any, *, lengths: Sequence[int], num_prompts: int, partition: str) -> Any:
    """Check one column of a batch against the column's declaration.

    Returns a dense column as one contiguous array of ``wire_dtype``, and a ragged or objects column
    unchanged: ``pack_rows`` checks the dtypes inside it.

    Raises ColumnMismatch when dtype, shape or count differ from the declaration.
    """
    where = f"column {column.name!r} of partition {partition!r}"
    num_values, unit = (num_prompts, "prompts") if column.per_prompt else (len(lengths), "samples")
    if not column.is_dense:
        if isinstance(values, str | bytes) or not isinstance(values, Sequence):
            raise ColumnMismatch(
                f"{where} takes a sequence of one value per {unit[:-1]}, not {type(values).__name__}"
            )
        if len(values) != num_values:
            raise ColumnMismatch(f"{where} has {len(values)} values for {num_values} {unit}")
        return values
    array = _as_array(column, values, where)
    expected = wire_shape(column, lengths, num_prompts)
    if array.shape != expected:
        raise ColumnMismatch(
            f"{where} has shape {list(array.shape)} where {num_values} {unit} of {sum(lengths)} tokens "
            f"give {list(expected)}"
        )
    return np.ascontiguousarray(array)


def from_wire(column: Column, array: np.ndarray) -> Any:
    """Return a dense column's array as consumers get it: read-only; for bfloat16 a torch tensor."""
    if column.dtype == "bfloat16":
        import torch

        return torch.from_numpy(array.copy()).view(torch.bfloat16)
    view = array.view() if array.flags.aligned else array.copy()
    view.flags.writeable = False
    return view


def pack_rows(column: Column, values: Sequence[Any]) -> np.ndarray:
    """Pack a ragged or objects column into one uint8 array: [N, offsets of N rows and of the end], rows.

    Raises ColumnMismatch on a dtype that a ragged column can't hold.
    """
    encode = _encode_tensors if column.layout is Layout.ragged else _encode_object
    rows = [encode(value, column.name) for value in values]
    header = np.empty(len(rows) + 2, _INT)
    header[0] = len(rows)
    header[1] = _aligned(header.nbytes)
    header[2:] = [sum(_aligned(piece.nbytes) for piece in pieces) for pieces in rows]
    np.cumsum(header[1:], out=header[1:])
    packed = np.zeros(int(header[-1]), np.uint8)
    packed[: header.nbytes] = header.view(np.uint8)
    for start, pieces in zip(header[1:-1].tolist(), rows, strict=True):
        position = start
        for piece in pieces:
            packed[position : position + piece.nbytes] = piece
            position += _aligned(piece.nbytes)
    return packed


def num_packed_rows(packed: np.ndarray) -> int:
    """Return how many rows an array of ``pack_rows`` holds; -1 for any other array, or one cut short."""
    if packed.nbytes < 2 * _INT.itemsize:
        return -1
    rows = int(_header(packed, 0, 1)[0])
    if rows < 0 or (rows + 2) * _INT.itemsize > packed.nbytes:
        return -1
    return rows if int(_header(packed, rows + 1, rows + 2)[0]) == packed.nbytes else -1


def unpack_row(column: Column, packed: np.ndarray, row: int) -> Any:
    """Return one row of ``packed``: numpy arrays in it are read-only views, torch tensors are copies."""
    start, stop = _header(packed, row + 1, row + 3).tolist()
    decode = _decode_tensors if column.layout is Layout.ragged else _decode_object
    return decode(packed[start:stop])


def _as_array(column: Column, values: Any, where: str) -> np.ndarray:
    dtype = str(getattr(values, "dtype", None)).removeprefix("torch.")
    if dtype != column.dtype:
        raise ColumnMismatch(f"{where} is declared {column.dtype} but got {dtype} ({type(values).__name__})")
    if column.dtype == "bfloat16":
        return _torch_bytes(values).view(np.uint16).reshape(tuple(values.shape))
    if not isinstance(values, np.ndarray):
        raise ColumnMismatch(f"{where} takes a numpy array, not {type(values).__name__}")
    return values


def _header(data: np.ndarray, start: int, stop: int) -> np.ndarray:
    """Return the int64 numbers [start:stop] of the header with which ``data`` begins."""
    return data[start * _INT.itemsize : stop * _INT.itemsize].view(_INT)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _numpy_bytes(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array in C order, [nbytes] uint8."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _torch_bytes(tensor: Any) -> np.ndarray:
    """Return the bytes of a torch tensor of any dtype, [nbytes] uint8."""
    import torch

    flat = tensor.detach().cpu().contiguous().flatten()
    # An empty tensor may have a stride of 0, and then torch makes no view of it.
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def _encode_tensors(tensors: Any, name: str) -> list[np.ndarray]:
    """Return the pieces of one row: a header, then each tensor's bytes.

    The header is [length of what follows, count, then per tensor: library, dtype code, ndim, dims...]. Raises
    ColumnMismatch for a value or a dtype that a ragged column can't hold.
    """
    if not isinstance(tensors, Sequence) or isinstance(tensors, str | bytes):
        raise ColumnMismatch(
            f"ragged column {name!r} takes a sequence of tensors per sample, not {type(tensors).__name__}"
        )
    header, pieces = [len(tensors)], []
    for tensor in tensors:
        dtype = str(getattr(tensor, "dtype", None)).removeprefix("torch.")
        is_array = isinstance(tensor, np.ndarray)
        if dtype not in _DTYPE_CODES or not (is_array or type(tensor).__module__.startswith("torch")):
            raise ColumnMismatch(
                f"ragged column {name!r} takes numpy arrays and torch tensors of {', '.join(DTYPES)}; "
                f"got {type(tensor).__name__} of dtype {dtype}. Declare it as objects"
            )
        header += [_NUMPY if is_array else _TORCH, _DTYPE_CODES[dtype], len(tensor.shape), *tensor.shape]
        pieces.append(_numpy_bytes(tensor) if is_array else _torch_bytes(tensor))
    return [np.array([len(header), *header], _INT).view(np.uint8), *pieces]


def _decode_tensors(data: np.ndarray) -> list[Any]:
    length = int(_header(data, 0, 1)[0])
    numbers = iter(_header(data, 1, 1 + length).tolist())
    position = _aligned((1 + length) * _INT.itemsize)
    tensors = []
    for _ in range(next(numbers)):
        library, code, ndim = next(numbers), next(numbers), next(numbers)
        shape = tuple(next(numbers) for _ in range(ndim))
        name = DTYPES[code]
        itemsize = 2 if name == "bfloat16" else np.dtype(name).itemsize
        nbytes = int(np.prod(shape, dtype=np.int64)) * itemsize
        tensors.append(_DECODERS[library](data[position : position + nbytes], name, shape))
        position += _aligned(nbytes)
    return tensors


def _numpy_tensor(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    array = data.view(dtype).reshape(shape)
    array.flags.writeable = False
    return array


def _torch_tensor(data: np.ndarray, dtype: str, shape: tuple[int, ...]) -> Any:
    import torch

    tensor = torch.empty(shape, dtype=getattr(torch, dtype))
    if data.size:  # torch may refuse a view of an empty tensor
        np.copyto(tensor.view(-1).view(torch.uint8).numpy(), data)
    return tensor


_DECODERS: dict[int, Callable[[np.ndarray, str, tuple[int, ...]], Any]] = {
    _NUMPY: _numpy_tensor,
    _TORCH: _torch_tensor,
}


def _encode_object(value: Any, name: str) -> list[np.ndarray]:
    """Return a row's pieces: [bytes of the pickle, number of buffers, bytes of each], pickle, buffers."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = np.frombuffer(pickle.dumps(value, protocol=5, buffer_callback=buffers.append), np.uint8)
    raw = [np.asarray(buffer.raw()).reshape(-1) for buffer in buffers]
    header = np.array([pickled.nbytes, len(raw), *(piece.nbytes for piece in raw)], _INT)
    return [header.view(np.uint8), pickled, *raw]


def _decode_object(data: np.ndarray) -> Any:
    pickled_bytes, count = _header(data, 0, 2).tolist()
    sizes = _header(data, 2, 2 + count).tolist()
    position = _aligned((2 + count) * _INT.itemsize)
    pickled = data[position : position + pickled_bytes]
    position += _aligned(pickled_bytes)
    buffers = []
    for size in sizes:
        piece = data[position : position + size]
        piece.flags.writeable = False
        buffers.append(piece)
        position += _aligned(size)
    return pickle.loads(pickled.data, buffers=buffers)
