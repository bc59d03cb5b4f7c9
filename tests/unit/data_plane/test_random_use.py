"""Any sequence of puts, partial writes, fetches and clears behaves like a dictionary of samples."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nemo_like.batch.columns import GENERATION_LOGPROBS, INPUT_IDS, PREV_LOGPROBS, Column, Layout
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data_plane.in_memory import InMemoryDataPlane

NOTES = Column("notes", "", Layout.objects)
LATER = (GENERATION_LOGPROBS, PREV_LOGPROBS)


class DataPlaneMachine(RuleBasedStateMachine):
    """Three clients; the model holds what every live sample's columns must read."""

    @initialize()
    def start(self) -> None:
        first = InMemoryDataPlane(timeout_s=0.05)
        self.planes = [first, *(InMemoryDataPlane(first.host, timeout_s=0.01) for _ in range(2))]
        first.open_partition("p", (INPUT_IDS, NOTES, *LATER))
        self.batch: KVBatchMeta | None = None
        self.model: dict[str, dict[str, object]] = {}
        self.rng = np.random.default_rng(0)

    @rule(
        lengths=st.lists(st.integers(0, 4), min_size=1, max_size=8),
        chunk_size=st.integers(1, 4),
        client=st.integers(0, 2),
    )
    def put(self, lengths: list[int], chunk_size: int, client: int) -> None:
        sizes = [min(chunk_size, len(lengths) - start) for start in range(0, len(lengths), chunk_size)]
        ids = self.rng.integers(0, 1000, sum(lengths)).astype(np.int32)
        notes = [f"note {number}" for number in self.rng.integers(0, 1000, len(lengths))]
        meta = self.planes[client].put(
            "p", {"input_ids": ids, "notes": notes}, lengths=lengths, chunk_sizes=sizes, tags={}
        )
        pieces = np.split(ids, np.cumsum(lengths)[:-1])
        for sample, piece, note in zip(meta.sample_ids, pieces, notes, strict=True):
            self.model[sample] = {"input_ids": piece.tolist(), "notes": note}
        self.batch = meta if self.batch is None else KVBatchMeta.concat([self.batch, meta])

    @precondition(lambda self: self.batch is not None and len(self.batch))
    @rule(data=st.data(), client=st.integers(0, 2), column=st.sampled_from(LATER))
    def write(self, data: st.DataObject, client: int, column: Column) -> None:
        assert self.batch is not None
        free = [p for p, sample in enumerate(self.batch.sample_ids) if column.name not in self.model[sample]]
        if not free:
            return
        part = self.batch.subset(data.draw(st.lists(st.sampled_from(free), unique=True)))
        values = self.rng.random(sum(part.lengths)).astype(np.float32)
        self.planes[client].write(part, {column.name: values})
        pieces = np.split(values, np.cumsum(part.lengths)[:-1])
        for sample, piece in zip(part.sample_ids, pieces, strict=False):
            self.model[sample][column.name] = piece.tolist()

    @precondition(lambda self: self.batch is not None and len(self.batch))
    @rule(data=st.data(), client=st.integers(0, 2))
    def fetch(self, data: st.DataObject, client: int) -> None:
        assert self.batch is not None
        part = self.batch.subset(
            data.draw(st.lists(st.integers(0, len(self.batch) - 1), unique=True, min_size=1))
        )
        everywhere = set.intersection(*(set(self.model[sample]) for sample in part.sample_ids))
        got = self.planes[client].fetch(part, sorted(everywhere))
        assert set(got) == everywhere
        for name, values in got.items():
            if name == "notes":
                assert values == [self.model[sample]["notes"] for sample in part.sample_ids]
                continue
            pieces = np.split(values, np.cumsum(part.lengths)[:-1])
            for sample, piece in zip(part.sample_ids, pieces, strict=True):
                assert piece.tolist() == self.model[sample][name]

    @precondition(lambda self: self.batch is not None and len(self.batch))
    @rule(data=st.data(), client=st.integers(0, 2))
    def clear(self, data: st.DataObject, client: int) -> None:
        assert self.batch is not None
        dropped = data.draw(st.lists(st.integers(0, len(self.batch) - 1), unique=True))
        part = self.batch.subset(dropped)
        self.planes[client].clear(part)
        for sample in part.sample_ids:
            del self.model[sample]
        self.batch = self.batch.subset([p for p in range(len(self.batch)) if p not in set(dropped)])
        if not len(self.batch):
            self.planes[0].host.ask("settled", "p", 5.0)
            assert self.planes[0].host.storage.num_bytes == 0


DataPlaneMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20)
test_any_sequence_of_operations_reads_what_was_written = DataPlaneMachine.TestCase
