"""What a teacher writes for which loss, and that it never trains."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_like.algorithms.logprobs import LogprobSettings
from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    TEACHER_LOGPROBS,
    ColumnError,
    teacher_topk_columns,
)
from nemo_like.policy.batch.teacher_columns import num_most_likely, teacher_columns, teacher_declaration
from nemo_like.policy.loss.checked_loss import own_reads
from nemo_like.policy.loss.objective import TeacherObjective
from tests.unit.algorithms.loss_cases import of_kind


@pytest.mark.parametrize(
    ("own", "names", "k"),
    [
        ({}, ["teacher_logprobs"], 0),
        ({"divergence": "forward", "top_k": 7}, ["teacher_topk_ids", "teacher_topk_logprobs"], 7),
        ({"divergence": "jensen_shannon"}, ["teacher_topk_ids", "teacher_topk_logprobs"], 32),
    ],
)
def test_a_teacher_writes_what_the_loss_reads(own: dict[str, Any], names: list[str], k: int) -> None:
    columns = teacher_columns(own_reads(of_kind("distillation", own)))
    assert [column.name for column in columns] == names
    assert num_most_likely(columns) == k
    declared = teacher_declaration(columns)
    assert declared.writes == columns
    assert [column.name for column in declared.reads] == ["input_ids", "response_mask"]


def test_of_the_columns_of_a_loss_of_ones_own_a_teacher_writes_those_that_are_a_teachers() -> None:
    ids, logprobs = teacher_topk_columns(3)
    columns = teacher_columns((GENERATION_LOGPROBS, logprobs, TEACHER_LOGPROBS, ids))
    assert columns == (logprobs, TEACHER_LOGPROBS, ids)
    assert num_most_likely(columns) == 3


def test_a_loss_that_asks_no_teacher_is_refused() -> None:
    with pytest.raises(ColumnError, match="reads no column of a teacher"):
        teacher_columns((GENERATION_LOGPROBS,))


def test_a_teacher_cannot_be_asked_to_train() -> None:
    objective = TeacherObjective(LogprobSettings(temperature=1.0))
    assert not objective.keeps_reference
    with pytest.raises(RuntimeError, match="a teacher is frozen"):
        objective.loss_of_update(None, None, None)  # type: ignore[arg-type]
