"""Which samples may be accumulated, and with which the update is made."""

from __future__ import annotations

import pytest

from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.policy.groups.accumulated_samples import AccumulatedSamples

NAN = float("nan")
BATCH = KVBatchMeta(
    partition="train-3",
    chunks=(Chunk("a", (4, 4)), Chunk("b", (4, 4, 4))),
    rows=((0, 0), (0, 1), (1, 0), (1, 1), (1, 2)),
    columns=frozenset(),
    tags={"advantage": (0.5, -1.0, NAN, 2.0, 0.0), "sample_mask": (1, 1, 0, 1, 1)},
)


def accumulated(*parts: list[int]) -> AccumulatedSamples:
    """Parts of the batch's first update of four samples."""
    samples = AccumulatedSamples(4)
    for part in parts:
        samples.check_new(BATCH.subset(part))
        samples.add(BATCH.subset(part), len(part))
    return samples


def test_parts_in_any_order_make_the_first_update() -> None:
    samples = accumulated([3], [1, 0], [2])
    samples.check(BATCH, 4)
    assert samples.num_computed == 4
    samples.clear()
    samples.check(BATCH, 0)
    assert samples.num_computed == 0


def test_a_sample_is_accumulated_once_and_no_more_than_an_update_has() -> None:
    with pytest.raises(ValueError, match="step 3: samples a/1 were accumulated before"):
        accumulated([0, 1], [1, 2])
    with pytest.raises(ValueError, match=r"3 samples were accumulated, and with 2 more they are over .*=4;"):
        accumulated([0, 1, 2], [3, 4])


@pytest.mark.parametrize("told", [0, 3])
def test_training_must_be_told_of_what_was_accumulated(told: int) -> None:
    with pytest.raises(ValueError, match=f"4 samples were accumulated, and train was told of {told}; tell"):
        accumulated([0, 1, 2, 3]).check(BATCH, told)
    with pytest.raises(ValueError, match="0 samples were accumulated, and train was told of 4"):
        accumulated().check(BATCH, 4)


def test_an_update_of_which_a_part_is_missing_is_refused() -> None:
    with pytest.raises(ValueError, match="only 3 samples of the first update were accumulated"):
        accumulated([0, 1, 2]).check(BATCH, 3)


def test_samples_of_another_update_are_refused() -> None:
    with pytest.raises(ValueError, match="sample b/0 of the first update was not accumulated, but others"):
        accumulated([0, 1, 3, 4]).check(BATCH, 4)


def test_a_tag_that_changed_since_is_refused() -> None:
    samples = accumulated([0, 1, 2, 3])
    samples.check(BATCH.with_tags({"sample_mask": [1.0, 1.0, 0.0, 1.0, 0.0]}), 4)  # 1 is 1.0
    changed = BATCH.with_tags({"advantage": [0.5, -1.5, NAN, 2.0, 0.0]})
    with pytest.raises(ValueError, match=r"tag advantage of sample a/1 was -1.0 when .* is -1.5 in training"):
        samples.check(changed, 4)
