"""One interface over every way to move a step's columns, so that the same flow is timed over each.

A plane is the client of one process. ``prepare`` lays the batch out as that plane's users hold it, and
is not timed; ``put`` is. Fetched values come back packed, as the check and a variable-length trainer
want them.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from nemo_like.batch.columns import POLICY_COLUMNS, ROLLOUT_COLUMNS, Column, Layout
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.micro_batches import fixed_size
from nemo_like.batch.sharding import by_generation, shard_for_logprobs, shard_for_training
from nemo_like.batch.tags import ADVANTAGE, NUM_RESPONSE_TOKENS, REWARD, SAMPLE_MASK, Tag, by_tag_name
from nemo_like.data_plane.connection import connect
from nemo_like.data_plane.spec import DataPlaneSpec
from scripts.bench.data_plane_bench.batch import (
    GROUP_SIZE,
    PUT_ROW_COLUMNS,
    PUT_TOKEN_COLUMNS,
    Batch,
)

# By which the check knows what it gets.
ROW = Tag("row", int, "benchmark", (), "in the whole batch")
# The flow of trainers whose driver computes advantages per token writes this column too.
ADVANTAGES = Column("advantages", "float32", Layout.per_token, "one float per token")
OUR_COLUMNS = (*ROLLOUT_COLUMNS, *POLICY_COLUMNS, ADVANTAGES)
_BY_NAME = {column.name: column for column in OUR_COLUMNS}

# dtypes of the tensors that trainers index and mask with, for the planes that carry torch tensors.
_TENSOR_DTYPES = {"input_ids": "int64", "response_mask": "int64", "lengths": "int64"}

# How our micro-batches are cut.
_STRATEGY = fixed_size(GROUP_SIZE // 4)


@dataclass(frozen=True, slots=True)
class Rows:
    """What a plane's metadata is wrapped in: ``handle`` names the values of these rows of the batch."""

    handle: Any
    rows: tuple[int, ...]


class Plane(Protocol):
    def prepare(self, batch: Batch) -> None: ...

    def put(self, partition: str) -> Rows:
        """The producer's first write of five columns."""

    def mix(self, whole: Rows) -> Rows:
        """The order in which this framework's driver trains: every update has samples of many groups."""

    def shard(self, whole: Rows, num_shards: int) -> list[Rows]:
        """For the stages that write; on metadata alone."""

    def shard_for_training(self, whole: Rows, num_shards: int) -> list[Rows]: ...

    def fetch(self, rows: Rows, columns: Sequence[str]) -> dict[str, Any]: ...

    def lay_out(self, rows: Rows, packed: np.ndarray) -> Any:
        """A token column as this plane's writers hold it; not timed."""

    def write(self, rows: Rows, columns: Mapping[str, Any]) -> Any:
        """Columns as laid out; what ``merge`` needs to know of them."""

    def merge(self, whole: Rows, written: Sequence[Any]) -> Rows:
        """The driver's metadata after its workers wrote."""

    def tag(self, whole: Rows, advantages: Sequence[float]) -> Rows:
        """One scalar per sample, set by the driver."""

    def forget(self, rows: Rows) -> None:
        """Drop what this process keeps."""

    def clear(self, whole: Rows) -> None: ...


class Ours:
    """This framework's data plane. Lengths and per-sample scalars travel in the metadata."""

    def __init__(self, spec: DataPlaneSpec) -> None:
        self._plane = connect(spec)

    def prepare(self, batch: Batch) -> None:
        self._columns = {name: batch.columns[name] for name in PUT_TOKEN_COLUMNS}
        self._lengths = batch.lengths.tolist()
        self._tags = by_tag_name(
            {
                ROW: list(range(batch.shape.num_rows)),
                REWARD: [0.5] * batch.shape.num_rows,
                SAMPLE_MASK: batch.columns[SAMPLE_MASK.name].tolist(),
                NUM_RESPONSE_TOKENS: [length // 2 for length in self._lengths],
            }
        )

    def put(self, partition: str) -> Rows:
        meta = self._plane.put(
            partition,
            self._columns,
            lengths=self._lengths,
            chunk_sizes=[GROUP_SIZE] * (len(self._lengths) // GROUP_SIZE),
            tags=self._tags,
        )
        return Rows(meta, tuple(range(len(meta))))

    def mix(self, whole: Rows) -> Rows:
        order = by_generation(len(whole.rows) // GROUP_SIZE, GROUP_SIZE)
        return Rows(whole.handle.subset(order), tuple(order))

    def shard(self, whole: Rows, num_shards: int) -> list[Rows]:
        return self._sharded(whole, shard_for_logprobs, num_shards)

    def shard_for_training(self, whole: Rows, num_shards: int) -> list[Rows]:
        return self._sharded(whole, shard_for_training, num_shards, ADVANTAGE)

    def _sharded(
        self, whole: Rows, shard: Callable[..., Any], num_shards: int, *tags: Tag[Any]
    ) -> list[Rows]:
        """With the tags that the stage needs, as the policy worker group sends them, and the check's."""
        shards = shard(
            whole.handle.only_tags(SAMPLE_MASK, NUM_RESPONSE_TOKENS, *tags, ROW),
            num_shards=num_shards,
            global_batch_size=len(whole.handle),
            strategy=_STRATEGY,
        )
        return [Rows(meta, meta.tag(ROW)) for meta in shards]

    def fetch(self, rows: Rows, columns: Sequence[str]) -> dict[str, Any]:
        meta: KVBatchMeta = rows.handle
        tags = [name for name in columns if name in meta.tags]
        fetched = self._plane.fetch(meta, [name for name in columns if name not in tags])
        # Scalars of a sample are in the metadata already.
        return fetched | {name: np.asarray(meta.tags[name], np.float32) for name in tags}

    def lay_out(self, rows: Rows, packed: np.ndarray) -> np.ndarray:
        # As the policy's workers give it, and then do not change it.
        packed.flags.writeable = False
        return packed

    def write(self, rows: Rows, columns: Mapping[str, Any]) -> tuple[str, ...]:
        self._plane.write(rows.handle, columns)
        return tuple(columns)

    def merge(self, whole: Rows, written: Sequence[Any]) -> Rows:
        return replace(whole, handle=whole.handle.with_columns(*(_BY_NAME[name] for name in written[0])))

    def tag(self, whole: Rows, advantages: Sequence[float]) -> Rows:
        return replace(whole, handle=whole.handle.with_tag(ADVANTAGE, advantages))

    def forget(self, rows: Rows) -> None:
        self._plane.forget(rows.handle.partition)

    def clear(self, whole: Rows) -> None:
        """The partition is closed by whoever opened it."""


@dataclass(slots=True)
class _TensorBatch:
    """A batch as torch tensors, in the dtypes of a plane."""

    dtypes: Mapping[str, str]
    batch: Batch
    lengths: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.lengths = self.batch.lengths.tolist()

    def packed(self, name: str) -> Any:
        import torch

        values = torch.from_numpy(self.batch.columns[name])
        return values.to(getattr(torch, self.dtypes[name])) if name in self.dtypes else values


def _jagged(values: Any, lengths: Sequence[int]) -> Any:
    import torch

    return torch.nested.as_nested_tensor(list(values.split(list(lengths))), layout=torch.jagged)


class PlainTransferQueue:
    """TransferQueue's own key-value calls with a key per sample and jagged columns."""

    def __init__(self, dtypes: Mapping[str, str]) -> None:
        import transfer_queue

        transfer_queue.init()
        self._tq, self._dtypes = transfer_queue, dtypes

    def prepare(self, batch: Batch) -> None:
        tensors = _TensorBatch(self._dtypes, batch)
        self._batch = batch
        self._fields = {name: _jagged(tensors.packed(name), tensors.lengths) for name in PUT_TOKEN_COLUMNS}
        self._fields |= {name: tensors.packed(name).unsqueeze(-1) for name in PUT_ROW_COLUMNS}
        self._tags = [{"reward": 0.5, "length": length} for length in tensors.lengths]

    def put(self, partition: str) -> Rows:
        from tensordict import TensorDict

        num_rows = len(self._tags)
        run = uuid.uuid4().hex[:8]
        keys = [f"{run}_{row}" for row in range(num_rows)]
        self._tq.kv_batch_put(
            keys=keys,
            partition_id=partition,
            fields=TensorDict(self._fields, batch_size=num_rows),
            tags=self._tags,
        )
        return Rows((partition, keys), tuple(range(num_rows)))

    def mix(self, whole: Rows) -> Rows:
        return whole

    def shard(self, whole: Rows, num_shards: int) -> list[Rows]:
        partition, keys = whole.handle
        return [
            Rows((partition, keys[rank::num_shards]), whole.rows[rank::num_shards])
            for rank in range(num_shards)
        ]

    def shard_for_training(self, whole: Rows, num_shards: int) -> list[Rows]:
        return self.shard(whole, num_shards)

    def fetch(self, rows: Rows, columns: Sequence[str]) -> dict[str, Any]:
        partition, keys = rows.handle
        data = self._tq.kv_batch_get(keys, partition, select_fields=list(columns))
        # What it can't find it leaves out; a plain integration has to look, too.
        if data.batch_size[0] != len(keys) or set(data.keys()) != set(columns):
            raise KeyError(f"TransferQueue returned {data.batch_size[0]} rows of {sorted(data.keys())}")
        fetched = {}
        for name in columns:
            column = data[name]
            values = column.values() if column.is_nested else column
            fetched[name] = (values.reshape(-1) if name in PUT_ROW_COLUMNS else values).numpy()
        return fetched

    def lay_out(self, rows: Rows, packed: np.ndarray) -> Any:
        import torch

        return _jagged(torch.from_numpy(packed), self._batch.lengths[list(rows.rows)].tolist())

    def write(self, rows: Rows, columns: Mapping[str, Any]) -> None:
        from tensordict import TensorDict

        partition, keys = rows.handle
        self._tq.kv_batch_put(
            keys=keys, partition_id=partition, fields=TensorDict(dict(columns), batch_size=len(keys))
        )

    def merge(self, whole: Rows, written: Sequence[Any]) -> Rows:
        return whole

    def tag(self, whole: Rows, advantages: Sequence[float]) -> Rows:
        partition, keys = whole.handle
        tags = [{"advantage": value} for value in advantages]
        self._tq.kv_batch_put(keys=keys, partition_id=partition, tags=tags)
        return whole

    def forget(self, rows: Rows) -> None:
        """Keeps nothing."""

    def clear(self, whole: Rows) -> None:
        partition, keys = whole.handle
        self._tq.kv_clear(keys, partition)


class RayObjectStore:
    """Dictionaries of right-padded [rows, max_length] tensors in Ray's object store."""

    def __init__(self, dtypes: Mapping[str, str]) -> None:
        self._dtypes = dtypes

    def prepare(self, batch: Batch) -> None:
        tensors = _TensorBatch(self._dtypes, batch)
        self._batch = batch
        self._columns = {
            name: self._padded(tensors.packed(name), batch.lengths) for name in PUT_TOKEN_COLUMNS
        }
        self._columns |= {name: tensors.packed(name) for name in PUT_ROW_COLUMNS}

    def put(self, partition: str) -> Rows:
        import ray

        # (the rows of an object in the batch's order, the object)
        rows = tuple(range(self._batch.shape.num_rows))
        reference = ray.put(self._columns)
        return Rows({name: [(rows, [reference])] for name in self._columns}, rows)

    def mix(self, whole: Rows) -> Rows:
        return whole

    def shard(self, whole: Rows, num_shards: int) -> list[Rows]:
        return [Rows(whole.handle, whole.rows[rank::num_shards]) for rank in range(num_shards)]

    def shard_for_training(self, whole: Rows, num_shards: int) -> list[Rows]:
        return self.shard(whole, num_shards)

    def fetch(self, rows: Rows, columns: Sequence[str]) -> dict[str, Any]:
        import ray
        import torch

        fetched = {}
        wanted = set(rows.rows)
        objects: dict[Any, dict[str, Any]] = {}
        for name in columns:
            pieces, order = [], []
            for stored_rows, (reference,) in rows.handle[name]:
                here = [position for position, row in enumerate(stored_rows) if row in wanted]
                if not here:
                    continue
                if reference not in objects:
                    objects[reference] = ray.get(reference)
                values = objects[reference][name]
                pieces.append(values if len(here) == len(stored_rows) else values[here])
                order += [stored_rows[position] for position in here]
            column = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
            if tuple(order) != rows.rows:
                place = {row: position for position, row in enumerate(order)}
                column = column[[place[row] for row in rows.rows]]
            fetched[name] = self._unpadded(name, column, rows.rows)
        return fetched

    def lay_out(self, rows: Rows, packed: np.ndarray) -> Any:
        import torch

        return self._padded(torch.from_numpy(packed), self._batch.lengths[list(rows.rows)])

    def write(self, rows: Rows, columns: Mapping[str, Any]) -> dict[str, Any]:
        import ray

        reference = ray.put(dict(columns))
        return {name: (rows.rows, [reference]) for name in columns}

    def merge(self, whole: Rows, written: Sequence[Any]) -> Rows:
        handle = dict(whole.handle)
        for one in written:
            for name, stored in one.items():
                handle[name] = [*handle.get(name, []), stored]
        return replace(whole, handle=handle)

    def tag(self, whole: Rows, advantages: Sequence[float]) -> Rows:
        return whole

    def forget(self, rows: Rows) -> None:
        """Keeps nothing."""

    def clear(self, whole: Rows) -> None:
        whole.handle.clear()

    def _padded(self, packed: Any, lengths: np.ndarray) -> Any:
        import torch

        padded = torch.zeros(len(lengths), self._batch.shape.max_length, dtype=packed.dtype)
        for row, values in zip(padded, packed.split(lengths.tolist()), strict=True):
            row[: len(values)] = values
        return padded

    def _unpadded(self, name: str, column: Any, rows: Sequence[int]) -> Any:
        """A padded consumer takes the tensor as it is; only the check wants packed values."""
        if name in PUT_ROW_COLUMNS:
            return column.numpy()
        return _LazyPacked(column, self._batch.lengths[list(rows)])


class _LazyPacked:
    """A padded tensor that is packed when somebody looks at its values."""

    def __init__(self, padded: Any, lengths: np.ndarray) -> None:
        self._padded, self._lengths = padded, lengths

    @property
    def shape(self) -> tuple[int, ...]:
        return (int(self._lengths.sum()),)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        values = self._padded.numpy()
        return np.concatenate([row[:length] for row, length in zip(values, self._lengths, strict=True)])


def make_plane(name: str, source: Any) -> Plane:
    """``source``: for ours the DataPlaneSpec, for the others the dtypes of their tensors."""
    if name == "ours":
        return Ours(source)
    if name == "transfer_queue_plain":
        return PlainTransferQueue(source)
    return RayObjectStore(source)


def tensor_dtypes(choice: str) -> dict[str, str]:
    """``int64``: ids and masks as trainers index with them; ``narrow``: as this framework stores them."""
    return dict(_TENSOR_DTYPES) if choice == "int64" else {}
