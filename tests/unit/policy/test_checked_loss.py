from __future__ import annotations

import pytest

from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.policy.loss.checked_loss import LossFailed, ReadColumns
from nemo_like.policy.workers.training_worker import naming_samples


def test_what_a_loss_raises_is_told_with_step_prompt_and_sample() -> None:
    meta = KVBatchMeta(
        partition="train-3",
        chunks=(Chunk("a", (4, 4)), Chunk("b", (4, 4))),
        rows=((0, 1), (1, 0)),
        columns=frozenset(),
        tags={"group_id": (12, 13)},
    )
    with pytest.raises(LossFailed, match=r"^step 3, sample 1 of prompt 12: wrong$"), naming_samples(meta):
        raise LossFailed("wrong", 0)
    with pytest.raises(LossFailed, match=r"^step 3: wrong$"), naming_samples(meta):
        raise LossFailed("wrong")


def test_a_column_that_is_not_read_is_told_with_those_that_are() -> None:
    with pytest.raises(KeyError, match="does not read the column 'other', only credit, level; mark the loss"):
        ReadColumns(credit=1, level=2)["other"]
    with pytest.raises(KeyError, match="only none"):
        ReadColumns()["credit"]
