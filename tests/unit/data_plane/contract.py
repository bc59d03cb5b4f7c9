"""What every data plane must do: the same tests run on each implementation.

A module that subclasses ``DataPlaneContract`` provides a fixture ``planes``: clients as separate
processes would have them, and control over partitions.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_like.batch.columns import (
    POLICY_COLUMNS,
    ROLLOUT_COLUMNS,
    Column,
    Declaration,
    Layout,
    gather_columns,
)
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import REWARD
from nemo_like.data_plane.interface import DataPlane
from nemo_like.data_plane.storage_errors import (
    CapacityExceeded,
    ColumnMismatch,
    DuplicateWrite,
    MissingData,
    PartitionExists,
    UnknownColumn,
    UnknownPartition,
    UnknownSamples,
)
from tests.unit.data_plane import fields

# Chunks of 2, 3 and 1 samples; one sample without tokens.
LENGTHS = (3, 1, 0, 2, 4, 5)
CHUNK_SIZES = (2, 3, 1)
REWARDS = {"reward": (0.0, 1.0, 0.0, 0.5, 1.0, 0.0)}


class Planes(Protocol):
    timeout_s: float  # deadline of the clients' calls
    capacity_bytes: int  # of the whole storage

    def client(self) -> DataPlane:
        """As another process would have it; the same two clients in every test."""

    def other_client(self) -> DataPlane: ...

    def open(self, name: str, columns: Sequence[Column]) -> None: ...

    def close(self, name: str) -> None: ...

    def num_stored_keys(self) -> int:
        """Keys in storage, over all partitions, once nothing is being freed."""

    def num_stored_bytes(self, partition: str) -> int:
        """Bytes of the partition's values in storage, once nothing is being freed."""


_numbers = count()


def dense(
    name: str, dtype: str, inner_shape: tuple[int, ...] = (), layout: Layout = Layout.per_token
) -> Column:
    return Column(name, dtype, layout, "for tests", inner_shape)


def opened(planes: Planes, *columns: Column) -> str:
    """A fresh partition with these columns besides those of a GRPO step."""
    name = f"partition-{next(_numbers)}"
    parts = {"rollout": ROLLOUT_COLUMNS, "policy": POLICY_COLUMNS, "test": columns}
    planes.open(name, gather_columns([Declaration(part, of_part) for part, of_part in parts.items()]))
    return name


def ids(lengths: Sequence[int] = LENGTHS) -> np.ndarray:
    return np.arange(sum(lengths), dtype=np.int32)


def put(
    plane: DataPlane, partition: str, columns: dict[str, Any] | None = None, lengths: Sequence[int] = LENGTHS
) -> KVBatchMeta:
    return plane.put(
        partition,
        {"input_ids": ids(lengths), **(columns or {})},
        lengths=lengths,
        chunk_sizes=CHUNK_SIZES,
        tags=REWARDS,
    )


def rows_of(values: np.ndarray, lengths: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """By hand: the samples at these positions, one after the other."""
    bounds = np.cumsum([0, *lengths])
    return np.concatenate([values[bounds[p] : bounds[p + 1]] for p in positions])


class DataPlaneContract:
    def test_a_put_returns_the_batch_in_order_with_its_tags(self, planes: Planes) -> None:
        meta = put(planes.client(), opened(planes))
        assert meta.lengths == LENGTHS
        assert [len(chunk.lengths) for chunk in meta.chunks] == [2, 3, 1]
        assert meta.tag(REWARD) == REWARDS["reward"]
        assert meta.columns == {"input_ids"}

    @pytest.mark.parametrize(
        "dtype", ["int64", "int32", "int8", "uint8", "bool", "float64", "float32", "float16", "uint16"]
    )
    @pytest.mark.parametrize("inner_shape", [(), (2, 3)])
    def test_per_token_values_keep_dtype_shape_values_and_order(
        self, planes: Planes, dtype: str, inner_shape: tuple[int, ...]
    ) -> None:
        partition = opened(planes, dense("extra", dtype, inner_shape))
        values = np.random.default_rng(0).integers(0, 2, (sum(LENGTHS), *inner_shape)).astype(dtype)
        meta = put(planes.client(), partition, {"extra": values})
        got = planes.other_client().fetch(meta, ["extra"])["extra"]
        assert got.dtype == values.dtype
        np.testing.assert_array_equal(got, values)

    def test_bfloat16_columns_are_torch_tensors(self, planes: Planes) -> None:
        partition = opened(planes, dense("extra", "bfloat16", (2,)))
        values = torch.randn(sum(LENGTHS), 2).to(torch.bfloat16)
        meta = put(planes.client(), partition, {"extra": values})
        got = planes.other_client().fetch(meta, ["extra"])["extra"]
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, values)

    @pytest.mark.parametrize("inner_shape", [(), (4,), (2, 0)])
    def test_per_sample_values_come_back_as_one_row_each(
        self, planes: Planes, inner_shape: tuple[int, ...]
    ) -> None:
        partition = opened(planes, dense("extra", "float32", inner_shape, Layout.per_sample))
        values = np.random.default_rng(0).random((len(LENGTHS), *inner_shape)).astype(np.float32)
        meta = put(planes.client(), partition, {"extra": values})
        got = planes.other_client().fetch(meta.subset([4, 0]), ["extra"])["extra"]
        assert got.shape == (2, *inner_shape)
        np.testing.assert_array_equal(got, values[[4, 0]])

    def test_samples_carry_different_numbers_of_tensors_of_different_shapes(self, planes: Planes) -> None:
        """Multimodal inputs: images of several sizes, grids, none at all."""
        partition = opened(planes, Column("images", "", Layout.ragged))
        values: list[list[Any]] = [
            [np.ones((3, 2, 2), np.float32), np.array([1, 2], np.int64)],
            [],
            [np.zeros((0, 5), np.float16)],
            [torch.randn(2, 3).to(torch.bfloat16), np.array(True)],
            [np.arange(6, dtype=np.int32).reshape(2, 3).T],
            [torch.arange(3)],
        ]
        meta = put(planes.client(), partition, {"images": values})
        got = planes.other_client().fetch(meta.subset([3, 5, 4, 2, 1, 0]), ["images"])["images"]
        for row, expected in zip(got, [values[p] for p in (3, 5, 4, 2, 1, 0)], strict=True):
            assert len(row) == len(expected)
            for tensor, original in zip(row, expected, strict=True):
                assert type(tensor) is type(original)
                assert tensor.dtype == original.dtype
                assert tensor.shape == original.shape
                assert tensor.tolist() == original.tolist()

    @settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(batch=fields.batches(), data=st.data())
    def test_fields_of_every_kind_survive_in_any_order(
        self, planes: Planes, batch: tuple[list[int], list[int], dict[fields.Kind, Any]], data: st.DataObject
    ) -> None:
        lengths, chunk_sizes, values = batch
        partition = opened(planes, *(kind.column for kind in values))
        meta = planes.client().put(
            partition,
            {kind.name: column for kind, column in values.items()},
            lengths=lengths,
            chunk_sizes=chunk_sizes,
            tags={},
        )
        positions = data.draw(st.lists(st.integers(0, len(lengths) - 1), unique=True, min_size=1))
        part = meta.subset(positions)
        got = planes.other_client().fetch(part, [kind.name for kind in values])
        for kind, column in values.items():
            whole = fields.rows(kind, column, lengths, meta.prompt_index)
            expected = [whole[position] for position in positions]
            read = fields.rows(kind, got[kind.name], part.lengths, part.prompt_index)
            assert fields.frozen(read) == fields.frozen(expected)
        planes.close(partition)

    def test_what_a_prompt_has_is_stored_once_for_its_group(self, planes: Planes) -> None:
        levels = Column("levels", "float64", Layout.per_sample, "", (50,), per_prompt=True)
        pictures = Column("pictures", "", Layout.ragged, per_prompt=True)
        partition = opened(planes, levels, pictures)
        values = np.random.default_rng(0).random((3, 50))
        pixels = [[np.full((prompt + 1, 10), prompt)] for prompt in range(3)]
        meta = put(planes.client(), partition, {"levels": values, "pictures": pixels})
        assert planes.num_stored_bytes(partition) < 15 * 4 + values.nbytes + 1000
        reader = planes.other_client()
        got = reader.fetch(meta.subset([5, 1, 0]), ["levels", "pictures"])
        np.testing.assert_array_equal(got["levels"], values[[2, 0]])
        assert [picture.shape for (picture,) in got["pictures"]] == [(3, 10), (1, 10)]
        again = reader.fetch(meta, ["levels", "pictures"])
        np.testing.assert_array_equal(again["levels"], values)
        planes.client().clear(meta.subset([0]))
        left = planes.other_client().fetch(meta.subset([1, 2]), ["levels"])
        np.testing.assert_array_equal(left["levels"], values[:2])

    def test_what_a_prompt_has_comes_with_its_samples(self, planes: Planes) -> None:
        levels = Column("levels", "float32", Layout.per_sample, per_prompt=True)
        partition = opened(planes, levels)
        with pytest.raises(ColumnMismatch, match="has shape"):
            put(planes.client(), partition, {"levels": np.zeros(6, np.float32)})
        meta = put(planes.client(), partition)
        with pytest.raises(ColumnMismatch, match="must come with the put of its samples"):
            planes.client().write(meta, {"levels": np.zeros(3, np.float32)})

    def test_samples_that_are_all_empty_survive(self, planes: Planes) -> None:
        meta = planes.client().put(
            opened(planes), {"input_ids": ids((0, 0))}, lengths=(0, 0), chunk_sizes=(2,), tags={}
        )
        meta = planes.client().write(meta, {"prev_logprobs": np.zeros(0, np.float32)})
        got = planes.other_client().fetch(meta, ["input_ids", "prev_logprobs"])
        assert {name: (values.shape, str(values.dtype)) for name, values in got.items()} == {
            "input_ids": ((0,), "int32"),
            "prev_logprobs": ((0,), "float32"),
        }

    def test_any_python_object_survives(self, planes: Planes) -> None:
        partition = opened(planes, Column("extra", "", Layout.objects))
        log = [
            {"role": "user", "content": "1+1=", "ids": np.array([1, 2])},
            {"role": "assistant", "content": "2"},
        ]
        values = ["text", None, log, ("a", 1.5), {"nested": {"deeper": [b"bytes"]}}, 7]
        meta = put(planes.client(), partition, {"extra": values})
        got = planes.other_client().fetch(meta, ["extra"])["extra"]
        np.testing.assert_array_equal(got[2][0].pop("ids"), [1, 2])
        assert got[2][0] == {"role": "user", "content": "1+1="}
        assert [*got[:2], *got[3:]] == [*values[:2], *values[3:]]

    def test_a_changed_result_does_not_change_the_next_fetch(self, planes: Planes) -> None:
        partition = opened(planes, Column("extra", "", Layout.objects))
        meta = put(planes.client(), partition, {"extra": [[1], [2], [3], [4], [5], [6]]})
        reader = planes.other_client()
        reader.fetch(meta, ["extra"])["extra"][0].append("changed")
        assert reader.fetch(meta, ["extra"])["extra"][0] == [1]
        with pytest.raises(ValueError, match="read-only"):
            reader.fetch(meta, ["input_ids"])["input_ids"][0] = 9

    def test_reusing_the_buffer_after_a_write_changes_nothing(self, planes: Planes) -> None:
        writer = planes.client()
        meta = put(writer, opened(planes))
        buffer = np.ones(sum(LENGTHS), np.float32)
        meta = writer.write(meta, {"prev_logprobs": buffer})
        buffer[:] = 7
        for reader in (writer, planes.other_client()):
            np.testing.assert_array_equal(reader.fetch(meta, ["prev_logprobs"])["prev_logprobs"], 1)

    def test_one_array_may_be_several_columns(self, planes: Planes) -> None:
        writer = planes.client()
        meta = put(writer, opened(planes))
        values = np.arange(sum(LENGTHS), dtype=np.float32)
        columns = ["prev_logprobs", "reference_logprobs"]
        meta = writer.write(meta, dict.fromkeys(columns, values))
        for got in planes.other_client().fetch(meta, columns).values():
            np.testing.assert_array_equal(got, values)

    def test_a_read_only_array_is_kept_as_it_is(self, planes: Planes) -> None:
        writer = planes.client()
        meta = put(writer, opened(planes))
        values = np.ones(sum(LENGTHS), np.float32)
        values.flags.writeable = False
        meta = writer.write(meta, {"prev_logprobs": values})
        assert np.shares_memory(writer.fetch(meta, ["prev_logprobs"])["prev_logprobs"], values)

    @pytest.mark.parametrize("positions", [[0], [5, 0], [2], [4, 3, 2, 1], [1, 4, 0], [0, 1, 2, 3, 4, 5]])
    def test_any_subset_in_any_order_can_be_fetched(self, planes: Planes, positions: list[int]) -> None:
        meta = put(planes.client(), opened(planes))
        got = planes.other_client().fetch(meta.subset(positions), ["input_ids"])["input_ids"]
        np.testing.assert_array_equal(got, rows_of(ids(), LENGTHS, positions))

    def test_nothing_is_fetched_for_no_samples(self, planes: Planes) -> None:
        meta = put(planes.client(), opened(planes)).subset([])
        got = planes.other_client().fetch(meta, ["input_ids"])["input_ids"]
        assert got.shape == (0,)
        assert got.dtype == np.int32

    def test_a_column_written_with_another_sharding_reads_as_one(self, planes: Planes) -> None:
        first, second = planes.client(), planes.other_client()
        meta = put(first, opened(planes))
        values = np.arange(sum(LENGTHS), dtype=np.float32)
        for writer, positions in ((first, [5, 1, 3]), (second, [0, 2, 4])):
            shard = meta.subset(positions)
            written = writer.write(shard, {"prev_logprobs": rows_of(values, LENGTHS, positions)})
            assert "prev_logprobs" in written.columns
        for reader in (first, second):
            got = reader.fetch(meta, ["prev_logprobs", "input_ids"])
            np.testing.assert_array_equal(got["prev_logprobs"], values)
            np.testing.assert_array_equal(got["input_ids"], ids())

    def test_a_column_has_one_writer_once(self, planes: Planes) -> None:
        first, second = planes.client(), planes.other_client()
        meta = put(first, opened(planes))
        first.write(meta.subset([3]), {"prev_logprobs": np.ones(2, np.float32)})
        keys = planes.num_stored_keys()
        with pytest.raises(DuplicateWrite, match=r"'prev_logprobs' of sample .*/1 was written already, by "):
            second.write(meta.subset([5, 3]), {"prev_logprobs": np.zeros(7, np.float32)})
        assert planes.num_stored_keys() == keys
        second.write(meta.subset([5]), {"prev_logprobs": np.zeros(5, np.float32)})
        got = second.fetch(meta.subset([3, 5]), ["prev_logprobs"])["prev_logprobs"]
        np.testing.assert_array_equal(got, [1, 1, 0, 0, 0, 0, 0])

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            (np.zeros(15), "declared float32 but got float64"),
            (np.zeros(15, np.int32), "declared float32 but got int32"),
            (np.zeros(14, np.float32), r"shape \[14\] where 6 samples of 15 tokens give \[15\]"),
            (np.zeros((15, 1), np.float32), r"shape \[15, 1\]"),
            ([0.0] * 15, "declared float32 but got None"),
            (torch.zeros(15), "takes a numpy array, not Tensor"),
            (np.zeros(15, ">f4"), "declared float32 but got >f4"),
        ],
    )
    def test_values_that_differ_from_the_declaration_raise(
        self, planes: Planes, values: Any, message: str
    ) -> None:
        partition = opened(planes)
        with pytest.raises(ColumnMismatch, match=message) as raised:
            put(planes.client(), partition, {"prev_logprobs": values})
        assert "prev_logprobs" in str(raised.value)
        assert partition in str(raised.value)

    def test_objects_need_one_value_per_sample(self, planes: Planes) -> None:
        partition = opened(planes, Column("extra", "", Layout.objects))
        with pytest.raises(ColumnMismatch, match="5 values for 6 samples"):
            put(planes.client(), partition, {"extra": [1, 2, 3, 4, 5]})
        with pytest.raises(ColumnMismatch, match="one value per sample, not str"):
            put(planes.client(), partition, {"extra": "abcdef"})

    def test_object_arrays_are_no_tensors(self, planes: Planes) -> None:
        partition = opened(planes, Column("images", "", Layout.ragged))
        with pytest.raises(ColumnMismatch, match="Declare it as objects"):
            put(planes.client(), partition, {"images": [[np.array([{}])]] * 6})

    def test_undeclared_columns_and_partitions_raise(self, planes: Planes) -> None:
        client, partition = planes.client(), opened(planes)
        with pytest.raises(UnknownPartition, match="'nowhere' is not open"):
            put(client, "nowhere")
        with pytest.raises(UnknownColumn, match=r"no column 'tokens'; declared are: .*input_ids"):
            put(client, partition, {"tokens": ids()})
        meta = put(client, partition)
        with pytest.raises(UnknownColumn, match="no column 'tokens'"):
            client.write(meta, {"tokens": ids()})
        with pytest.raises(UnknownColumn, match="no column 'tokens'"):
            planes.other_client().fetch(meta, ["input_ids", "tokens"])

    def test_a_fetch_names_its_columns(self, planes: Planes) -> None:
        meta = put(planes.client(), opened(planes))
        with pytest.raises(ValueError, match="names no columns"):
            planes.other_client().fetch(meta, [])

    @pytest.mark.parametrize("chunk_sizes", [(2, 3), (2, 3, 2), (6, 0), ()])
    def test_chunks_must_cover_the_samples(self, planes: Planes, chunk_sizes: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="chunk_sizes must be positive and sum to"):
            planes.client().put(
                opened(planes), {"input_ids": ids()}, lengths=LENGTHS, chunk_sizes=chunk_sizes, tags={}
            )

    def test_a_column_never_written_raises_at_the_deadline_and_says_whose_it_was(
        self, planes: Planes
    ) -> None:
        writer, reader, partition = planes.client(), planes.other_client(), opened(planes)
        meta = put(writer, partition)
        writer.write(meta.subset([0, 1, 2]), {"prev_logprobs": np.zeros(4, np.float32)})
        started = time.monotonic()
        with pytest.raises(MissingData) as raised:
            reader.fetch(meta, ["input_ids", "prev_logprobs"])
        assert planes.timeout_s * 0.9 < time.monotonic() - started < planes.timeout_s + 2
        message = str(raised.value)
        missing = meta.sample_ids[3:]
        assert partition in message
        assert "column 'prev_logprobs', to be written by 'policy'" in message
        assert all(sample in message for sample in missing)
        assert not any(sample in message for sample in meta.sample_ids[:3])

    def test_a_reader_waits_for_the_writer(self, planes: Planes) -> None:
        writer, reader = planes.client(), planes.other_client()
        meta = put(writer, opened(planes))
        result, waited = in_thread(lambda: reader.fetch(meta, ["prev_logprobs"])["prev_logprobs"])
        time.sleep(0.1)
        writer.write(meta.subset([0, 2, 4]), {"prev_logprobs": np.zeros(7, np.float32)})
        assert not result
        writer.write(meta.subset([1, 3, 5]), {"prev_logprobs": np.ones(8, np.float32)})
        written = time.monotonic()
        waited.join(planes.timeout_s)
        assert time.monotonic() - written < planes.timeout_s / 2
        np.testing.assert_array_equal(result[0], [0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1])

    def test_closing_a_partition_wakes_who_waits_for_it(self, planes: Planes) -> None:
        reader, partition = planes.other_client(), opened(planes)
        meta = put(planes.client(), partition)
        result, waited = in_thread(lambda: reader.fetch(meta, ["prev_logprobs"]))
        time.sleep(0.1)
        planes.close(partition)
        waited.join(planes.timeout_s / 2)
        assert isinstance(result[0], UnknownPartition)

    def test_cleared_samples_are_gone_and_the_others_stay(self, planes: Planes) -> None:
        client, reader = planes.client(), planes.other_client()
        meta = put(client, opened(planes))
        client.clear(meta.subset([0, 1, 3]))
        with pytest.raises(UnknownSamples, match=f"{meta.sample_ids[3]} were cleared"):
            reader.fetch(meta.subset([2, 3]), ["input_ids"])
        with pytest.raises(UnknownSamples, match="were cleared"):
            client.write(meta, {"prev_logprobs": np.zeros(15, np.float32)})
        kept = meta.subset([5, 2, 4])
        client.write(kept, {"prev_logprobs": np.zeros(9, np.float32)})
        got = reader.fetch(kept, ["input_ids"])["input_ids"]
        np.testing.assert_array_equal(got, rows_of(ids(), LENGTHS, [5, 2, 4]))

    def test_clearing_all_samples_of_a_group_frees_its_storage(self, planes: Planes) -> None:
        """Groups that are large enough to be stored by themselves."""
        client, partition, before = planes.client(), opened(planes), planes.num_stored_keys()
        lengths = (40_000,) * 4
        meta = client.put(
            partition, {"input_ids": ids(lengths)}, lengths=lengths, chunk_sizes=(2, 2), tags={}
        )
        assert planes.num_stored_keys() == before + 2
        client.clear(meta.subset([1, 0]))
        assert planes.num_stored_keys() == before + 1
        client.clear(meta.subset([2]))
        assert planes.num_stored_keys() == before + 1
        with pytest.raises(UnknownSamples, match=f"{meta.sample_ids[2]} were cleared"):
            client.clear(meta.subset([3, 2]))
        client.clear(meta.subset([3]))
        assert planes.num_stored_keys() == before

    def test_more_than_fits_is_refused_whole_and_cleared_samples_make_room(self, planes: Planes) -> None:
        client, partition = planes.client(), opened(planes)
        third = planes.capacity_bytes // 12  # so many tokens of 4 bytes fill a third
        lengths = (third, third)
        before = planes.num_stored_keys()
        meta = client.put(
            partition, {"input_ids": ids(lengths)}, lengths=lengths, chunk_sizes=(1, 1), tags={}
        )
        with pytest.raises(
            CapacityExceeded, match=rf"partition '{partition}': .* bytes do not fit"
        ) as raised:
            client.write(meta, {"prev_logprobs": np.zeros(2 * third, np.float32)})
        assert "data_plane.capacity_gib=" in str(raised.value)
        assert planes.num_stored_keys() == before + 2
        client.clear(meta.subset([0]))
        client.write(meta.subset([1]), {"prev_logprobs": np.ones(third, np.float32)})
        assert planes.other_client().fetch(meta.subset([1]), ["prev_logprobs"])["prev_logprobs"].all()
        planes.close(partition)
        partition = opened(planes)
        client.put(partition, {"input_ids": ids(lengths)}, lengths=lengths, chunk_sizes=(1, 1), tags={})
        planes.close(partition)
        assert planes.num_stored_keys() == before

    def test_clearing_a_group_frees_its_bytes_in_every_layout(self, planes: Planes) -> None:
        client, reader = planes.client(), planes.other_client()
        images = Column("images", "", Layout.ragged)
        partition = opened(planes, dense("extra", "int64", (2,), Layout.per_sample), images)
        pixels = [[np.full((row + 1, 50), row, np.int16)] for row in range(6)]
        extra = np.arange(12).reshape(6, 2)
        meta = put(client, partition, {"extra": extra, "images": pixels})
        before = planes.num_stored_bytes(partition)
        meta = client.write(meta, {"prev_logprobs": np.arange(15, dtype=np.float32)})
        written = planes.num_stored_bytes(partition)
        assert written == before + 15 * 4
        client.clear(meta.subset([2, 3]))
        assert planes.num_stored_bytes(partition) == written
        client.clear(meta.subset([4]))
        # The second group, of samples 2 to 4: ids, extra and three images. What was written for all samples
        # together goes with the last of them.
        dense_bytes = 6 * 4 + 3 * 2 * 8
        image_bytes = (3 + 4 + 5) * 50 * 2
        freed = written - planes.num_stored_bytes(partition)
        assert dense_bytes + image_bytes <= freed < dense_bytes + image_bytes + 500
        kept = meta.subset([5, 0, 1])
        for plane in (client, reader):
            got = plane.fetch(kept, ["input_ids", "extra", "images", "prev_logprobs"])
            np.testing.assert_array_equal(got["input_ids"], rows_of(ids(), LENGTHS, [5, 0, 1]))
            np.testing.assert_array_equal(got["extra"], extra[[5, 0, 1]])
            np.testing.assert_array_equal(got["prev_logprobs"], rows_of(ids(), LENGTHS, [5, 0, 1]))
            for row, position in zip(got["images"], (5, 0, 1), strict=True):
                np.testing.assert_array_equal(row[0], pixels[position][0])
        client.clear(kept)
        assert planes.num_stored_bytes(partition) == 0

    def test_who_cleared_samples_reads_them_no_more(self, planes: Planes) -> None:
        client = planes.client()
        meta = put(client, opened(planes))
        client.fetch(meta, ["input_ids"])
        client.clear(meta.subset([0]))
        with pytest.raises(UnknownSamples, match="were cleared"):
            client.fetch(meta.subset([0, 1]), ["input_ids"])
        assert client.fetch(meta.subset([1]), ["input_ids"])["input_ids"].tolist() == [3]

    def test_a_reader_never_gets_the_values_of_samples_that_took_the_place_of_cleared_ones(
        self, planes: Planes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The storage may give the place of a key that was cleared to another."""
        client, reader, partition = planes.client(), planes.other_client(), opened(planes)
        meta = put(client, partition)
        ask, cleared = reader._host.ask, []

        def replace_after(method: str, *args: Any) -> Any:
            answer = ask(method, *args)
            if method == "locate" and not cleared:
                cleared.append(meta)
                client.clear(meta)
                planes.num_stored_keys()
                put(client, partition)
            return answer

        monkeypatch.setattr(reader._host, "ask", replace_after)
        with pytest.raises(UnknownSamples, match="were cleared"):
            reader.fetch(meta, ["input_ids"])

    def test_a_group_may_be_cleared_while_a_reader_looks_for_its_neighbours(
        self, planes: Planes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client, reader = planes.client(), planes.other_client()
        meta = put(client, opened(planes))
        ask = reader._host.ask
        dropped = [meta.subset([0, 1])]

        def clear_after(method: str, *args: Any) -> Any:
            answer = ask(method, *args)
            if method == "locate" and dropped:
                client.clear(dropped.pop())
            return answer

        monkeypatch.setattr(reader._host, "ask", clear_after)
        got = reader.fetch(meta.subset([2, 3, 4]), ["input_ids"])["input_ids"]
        np.testing.assert_array_equal(got, rows_of(ids(), LENGTHS, [2, 3, 4]))
        assert not dropped

    def test_dropped_groups_are_refilled_by_a_second_put(self, planes: Planes) -> None:
        client, reader, partition = planes.client(), planes.other_client(), opened(planes)
        first = put(client, partition)
        client.clear(first.subset([0, 1]))
        second = put(client, partition)
        batch = KVBatchMeta.concat([first.subset([2, 3, 4, 5]), second.subset([0, 1])])
        np.testing.assert_array_equal(
            reader.fetch(batch, ["input_ids"])["input_ids"], rows_of(ids(), LENGTHS, [2, 3, 4, 5, 0, 1])
        )

    def test_a_closed_partition_is_empty_and_its_batches_are_dead(self, planes: Planes) -> None:
        client, partition, before = planes.client(), opened(planes), planes.num_stored_keys()
        meta = put(client, partition)
        assert planes.num_stored_keys() > before
        planes.close(partition)
        planes.close(partition)
        assert planes.num_stored_keys() == before
        with pytest.raises(UnknownPartition):
            put(client, partition)
        with pytest.raises(UnknownPartition):
            planes.other_client().fetch(meta, ["input_ids"])

    def test_a_partition_that_nobody_used_can_be_closed(self, planes: Planes) -> None:
        planes.close(opened(planes))

    def test_a_reopened_partition_starts_empty(self, planes: Planes) -> None:
        client, partition = planes.client(), opened(planes)
        old = put(client, partition)
        client.fetch(old, ["input_ids"])
        with pytest.raises(PartitionExists, match=f"{partition!r} is open already"):
            planes.open(partition, ROLLOUT_COLUMNS)
        planes.close(partition)
        planes.open(partition, ROLLOUT_COLUMNS)
        lengths = tuple(length + 1 for length in LENGTHS)
        new = put(client, partition, lengths=lengths)
        for reader in (client, planes.other_client()):
            np.testing.assert_array_equal(reader.fetch(new, ["input_ids"])["input_ids"], ids(lengths))
            with pytest.raises(UnknownSamples):
                reader.fetch(old, ["input_ids"])
        planes.close(partition)

    def test_two_partitions_do_not_mix(self, planes: Planes) -> None:
        client, one, two = planes.client(), opened(planes), opened(planes)
        first, second = put(client, one), put(client, two, {"response_mask": np.ones(15, np.uint8)})
        planes.close(one)
        got = planes.other_client().fetch(second, ["response_mask"])["response_mask"]
        assert got.tolist() == [1] * 15
        with pytest.raises(UnknownPartition):
            client.clear(first)

    def test_forgetting_releases_copies_only(self, planes: Planes) -> None:
        reader, partition = planes.other_client(), opened(planes)
        meta = put(planes.client(), partition)
        for _ in range(2):
            np.testing.assert_array_equal(reader.fetch(meta, ["input_ids"])["input_ids"], ids())
            reader.forget(partition)
        reader.forget("never heard of")

    def test_nothing_moves_twice_into_a_process(
        self, planes: Planes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        reader = planes.other_client()
        meta = put(planes.client(), opened(planes), {"response_mask": np.ones(15, np.uint8)})
        loaded: list[tuple[str, ...]] = []
        load = reader._store.load

        def spy(segments: Any, timeout_s: float) -> Any:
            loaded.extend(segment.columns for segment in segments)
            return load(segments, timeout_s)

        monkeypatch.setattr(reader._store, "load", spy)
        reader.fetch(meta.subset([1, 0]), ["input_ids", "response_mask"])
        assert loaded == [("input_ids", "response_mask")]
        meta = reader.write(meta, {"prev_logprobs": np.ones(15, np.float32)})
        reader.fetch(meta.subset([0, 1]), ["prev_logprobs", "input_ids", "response_mask"])
        assert len(loaded) == 1

    def test_what_was_written_apart_is_loaded_together(
        self, planes: Planes, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By one call of the store, which has all its requests under way at once."""
        writer, reader = planes.client(), planes.other_client()
        meta = put(writer, opened(planes))
        columns = ("prev_logprobs", "reference_logprobs")
        for value, name in enumerate(columns):
            meta = writer.write(meta, {name: np.full(15, value, np.float32)})
        loaded: list[set[tuple[str, ...]]] = []
        load = reader._store.load

        def spy(segments: Any, timeout_s: float) -> Any:
            loaded.append({segment.columns for segment in segments})
            return load(segments, timeout_s)

        monkeypatch.setattr(reader._store, "load", spy)
        got = reader.fetch(meta, ["input_ids", *columns])
        assert loaded == [{("input_ids",), ("prev_logprobs",), ("reference_logprobs",)}]
        np.testing.assert_array_equal(got["input_ids"], ids())
        for value, name in enumerate(columns):
            np.testing.assert_array_equal(got[name], value)


def in_thread(action: Callable[[], Any]) -> tuple[list[Any], threading.Thread]:
    """Run in a thread; the list gets the result, or what it raised."""
    result: list[Any] = []

    def run() -> None:
        try:
            result.append(action())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return result, thread
