"""Batch metadata: immutable, consistent, small."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest

from nemo_like.batch.columns import PREV_LOGPROBS
from nemo_like.batch.meta import Chunk, GlobalBatch, KVBatchMeta, MicroBatch, MicroBatchLayout, Schedule
from nemo_like.batch.tags import ADVANTAGE, POLICY_VERSION, REWARD


def batch(partition: str = "p", prefix: str = "1") -> KVBatchMeta:
    """Two chunks: a with samples of 1, 2 and 3 tokens, b with 4 and 5."""
    return KVBatchMeta(
        partition=partition,
        chunks=(Chunk(f"{prefix}.a", (1, 2, 3)), Chunk(f"{prefix}.b", (4, 5))),
        rows=((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)),
        columns=frozenset({"input_ids"}),
        tags={"reward": (0.0, 1.0, 0.0, 1.0, 1.0)},
    )


def test_a_subset_keeps_order_tags_and_only_the_chunks_it_needs() -> None:
    part = batch().subset([4, 3])
    assert part.lengths == (5, 4)
    assert part.sample_ids == ("1.b/1", "1.b/0")
    assert part.tag(REWARD) == (1.0, 1.0)
    assert part.chunks == (Chunk("1.b", (4, 5)),)


def test_a_slice_is_a_range_of_samples() -> None:
    assert batch().slice(1, 4).lengths == (2, 3, 4)
    assert len(batch().slice(2, 2)) == 0
    with pytest.raises(ValueError, match=r"no samples \[2, 6\) in a batch of 5"):
        batch().slice(2, 6)


def test_select_keeps_what_is_true() -> None:
    assert batch().select(batch().tag(REWARD)).lengths == (2, 4, 5)
    with pytest.raises(ValueError, match="4 values for 5 samples"):
        batch().select([1, 1, 1, 1])


def test_concat_joins_batches_and_shares_chunks() -> None:
    whole = batch()
    joined = KVBatchMeta.concat([whole.subset([3]), batch(prefix="2"), whole.subset([0, 4])])
    assert joined.lengths == (4, 1, 2, 3, 4, 5, 1, 5)
    assert [chunk.key for chunk in joined.chunks] == ["1.b", "2.a", "2.b", "1.a"]
    assert joined.tag(REWARD) == (1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0)
    assert joined.subset([0, 6, 7]) == KVBatchMeta.concat([whole.subset([3]), whole.subset([0, 4])])


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (batch(partition="q"), "different partitions"),
        (batch(prefix="2").with_columns(PREV_LOGPROBS), "different columns"),
        (batch(prefix="2").with_tag(ADVANTAGE, [0.0] * 5), "different tags"),
        (batch(), "occurs twice"),
    ],
)
def test_concat_refuses_what_does_not_fit(other: KVBatchMeta, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVBatchMeta.concat([batch(), other])


def test_concat_refuses_one_chunk_with_two_sets_of_lengths() -> None:
    other = KVBatchMeta(
        "p", (Chunk("1.a", (9, 9, 9)),), ((0, 1),), frozenset({"input_ids"}), {"reward": (0.0,)}
    )
    with pytest.raises(ValueError, match="two sets of lengths"):
        KVBatchMeta.concat([batch().subset([0]), other])


def test_inconsistent_parts_are_refused() -> None:
    chunks = (Chunk("1.a", (1, 2)),)
    with pytest.raises(ValueError, match="occurs twice"):
        KVBatchMeta("p", chunks, ((0, 0), (0, 0)), frozenset())
    for place in ((0, 2), (0, -1), (1, 0)):
        with pytest.raises(ValueError, match="no row"):
            KVBatchMeta("p", chunks, (place,), frozenset())
    with pytest.raises(ValueError, match="tag 'reward' has 1 values for 2 samples"):
        KVBatchMeta("p", chunks, ((0, 0), (0, 1)), frozenset(), {"reward": (1.0,)})


def test_changes_make_copies() -> None:
    original = batch()
    original.with_tag(ADVANTAGE, [0.0] * 5)
    original.with_columns(PREV_LOGPROBS)
    original.with_schedule(Schedule(()))
    assert original == batch()
    with pytest.raises(AttributeError):
        original.partition = "q"  # type: ignore[misc]
    with pytest.raises(KeyError, match=r"no tag 'advantage' .* there are \['reward'\]"):
        original.tag(ADVANTAGE)


def test_a_batch_arrives_as_it_was_sent() -> None:
    micro_batches = (MicroBatch((2, 0), 3), MicroBatch((1,), 2))
    update = GlobalBatch(3, 5, micro_batches)
    schedule = Schedule((update, GlobalBatch(0, 0, ())), MicroBatchLayout.packed, length_multiple=4)
    sent = batch().subset([4, 1, 0]).with_schedule(schedule)
    sent = sent.with_tags({"kind": ["a", "b", ""], "number": [1, 2, 2**40], "mixed": [1, 0.5, True]})
    whole = sent.with_schedule(replace(schedule, with_ends=True))
    assert whole != sent
    for meta in (sent, whole, batch(), batch().subset([])):
        arrived = pickle.loads(pickle.dumps(meta, protocol=5))
        assert arrived == meta
        assert [type(value) for values in arrived.tags.values() for value in values] == [
            type(value) for values in meta.tags.values() for value in values
        ]


def test_only_the_named_tags_are_kept() -> None:
    meta = batch().with_tag(ADVANTAGE, [0.5] * 5)
    assert set(meta.only_tags(ADVANTAGE).tags) == {"advantage"}
    assert meta.only_tags().columns == meta.columns
    with pytest.raises(KeyError, match="no tag 'policy_version'"):
        meta.only_tags(POLICY_VERSION)


def test_a_batch_is_small_on_the_wire_whatever_its_lengths() -> None:
    """The bytes per sample are those of six tags and a length, not of tokens."""
    rng = random.Random(0)
    sizes = {}
    for longest in (100, 40_000):
        num_samples, group = 1024, 8
        chunks = tuple(
            Chunk(f"12.{index}", tuple(rng.randint(1, longest) for _ in range(group)))
            for index in range(num_samples // group)
        )
        meta = KVBatchMeta(
            partition="train-1000",
            chunks=chunks,
            rows=tuple((chunk, row) for chunk in range(len(chunks)) for row in range(group)),
            columns=frozenset({"input_ids", "response_mask", "generation_logprobs", "prev_logprobs"}),
            tags={
                "reward": tuple(rng.random() for _ in range(num_samples)),
                "advantage": tuple(rng.random() for _ in range(num_samples)),
                "group_id": tuple(index // group for index in range(num_samples)),
                "sample_mask": (1,) * num_samples,
                "num_prompt_tokens": tuple(rng.randint(1, longest) for _ in range(num_samples)),
                "num_response_tokens": tuple(rng.randint(1, longest) for _ in range(num_samples)),
            },
        )
        wire = pickle.dumps(meta, protocol=5)
        assert pickle.loads(wire) == meta
        sizes[longest] = len(wire) / num_samples
    assert sizes[100] < 48
    # A length or token count above 255 takes one byte more, three of them per sample.
    assert sizes[40_000] < sizes[100] + 4
