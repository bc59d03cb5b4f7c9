"""What columns may be, and how those of a run are gathered."""

from __future__ import annotations

import re
from typing import Any

import pytest

from nemo_like.batch.columns import (
    POLICY_COLUMNS,
    ROLLOUT_COLUMNS,
    Column,
    ColumnError,
    Declaration,
    Layout,
    bytes_per_token,
    declared_by,
    gather_columns,
    reads,
    reads_by_arguments,
    teacher_topk_columns,
    writes,
)

CREDIT = Column("credit", "float32", Layout.per_token)
LEVEL = Column("level", "float32", Layout.per_sample, per_prompt=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": ""}, "must have letters"),
        ({"name": "a/b"}, "no slash"),
        ({"dtype": "float8"}, "is none of bool, uint8"),
        ({"dtype": ""}, "per_token column needs one"),
        ({"layout": Layout.ragged}, "has no dtype"),
        ({"layout": Layout.objects, "dtype": "", "inner_shape": (2,)}, "no inner_shape of its own"),
        ({"per_prompt": True}, "per token are each sample's own"),
        ({"inner_shape": (2.5,)}, "inner_shape=(2.5,) is not made of sizes"),
        ({"inner_shape": (-1,)}, "is not made of sizes"),
    ],
)
def test_a_declaration_that_contradicts_itself_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        Column(**{"name": "credit", "dtype": "float32", "layout": Layout.per_token, **fields})


def test_a_run_s_columns_are_those_that_its_parts_write_with_their_writers() -> None:
    parts = [
        Declaration("rollout", writes=ROLLOUT_COLUMNS),
        Declaration("policy", writes=POLICY_COLUMNS, reads=ROLLOUT_COLUMNS),
        Declaration("env.math", writes=(CREDIT, LEVEL)),
        Declaration("env.code", writes=(CREDIT,)),
        Declaration(
            "loss_fn", reads=(*POLICY_COLUMNS, Column("credit", "float32", Layout.per_token, "other"))
        ),
    ]
    gathered = gather_columns(parts)
    assert gathered == (*ROLLOUT_COLUMNS, *POLICY_COLUMNS, CREDIT, LEVEL)
    assert [column.writer for column in gathered][-3:] == ["policy", "env.math", "env.math"]
    assert bytes_per_token(gathered) == 4 + 1 + 4 + 4 + 4 + 4


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            [Declaration("data.train", writes=(CREDIT,)), Declaration("env.math", writes=(CREDIT,))],
            "column 'credit' is written by data.train and by env.math; rename one",
        ),
        (
            [
                Declaration("rollout", writes=ROLLOUT_COLUMNS),
                Declaration("env.a", writes=ROLLOUT_COLUMNS[:1]),
            ],
            "'input_ids' is written by rollout and by env.a",
        ),
        ([Declaration("env.math", writes=(CREDIT, CREDIT))], "is written by env.math and by env.math"),
        (
            [
                Declaration("env.math", writes=(LEVEL,)),
                Declaration("env.code", writes=(Column("level", "int32", Layout.per_sample),)),
            ],
            "'level' is written by env.math as per_sample float32 once per prompt and by env.code as "
            "per_sample int32; declare it alike",
        ),
        (
            [Declaration("rollout", writes=ROLLOUT_COLUMNS), Declaration("loss_fn", reads=(CREDIT,))],
            "'credit' is read by loss_fn, and nobody writes it; written are generation_logprobs, input_ids",
        ),
        (
            [
                Declaration("env.math", writes=(CREDIT,)),
                Declaration("loss_fn", reads=(Column("credit", "float32", Layout.per_token, "", (2,)),)),
            ],
            "is read by loss_fn as per_token float32[2], but env.math writes it as per_token float32;",
        ),
    ],
)
def test_parts_that_do_not_agree_are_named(parts: list[Declaration], message: str) -> None:
    with pytest.raises(ColumnError, match=re.escape(message)):
        gather_columns(parts)


def test_what_only_validation_brings_cannot_be_read() -> None:
    held_out = Declaration("data.validation", writes=(LEVEL,), trains=False)
    loss = Declaration("loss_fn", reads=(LEVEL,))
    with pytest.raises(ColumnError, match=r"data\.validation, which writes it, is for validation only"):
        gather_columns([held_out, loss])
    assert gather_columns([held_out, Declaration("data.train", writes=(LEVEL,)), loss]) == (LEVEL,)


def test_a_shape_may_be_a_list() -> None:
    column = Column("credit", "float32", Layout.per_token, inner_shape=[2])  # type: ignore[arg-type]
    assert column == Column("credit", "float32", Layout.per_token, inner_shape=(2,))
    assert hash(column)


def test_an_environment_s_values_are_numpy_s() -> None:
    with pytest.raises(ValueError, match="numpy has no bfloat16"):
        writes(Column("state", "bfloat16", Layout.per_token))


def test_code_is_marked_with_what_it_writes_and_reads() -> None:
    @writes(CREDIT)
    class Judge:
        pass

    @reads(LEVEL)
    def loss() -> None:
        pass

    assert declared_by("env.math", Judge()) == Declaration("env.math", writes=(CREDIT,))
    assert declared_by("loss_fn", loss) == Declaration("loss_fn", reads=(LEVEL,))
    assert declared_by("env.sums", object()) == Declaration("env.sums")


def test_arguments_may_decide_what_is_read() -> None:
    @reads_by_arguments(lambda size=2, **_: teacher_topk_columns(size))
    def loss() -> None:
        pass

    ids, logprobs = declared_by("loss_fn", loss, {"size": 4, "weight": 1.0}).reads
    assert (ids.name, ids.dtype, ids.inner_shape) == ("teacher_topk_ids", "int32", (4,))
    assert (logprobs.name, logprobs.dtype, logprobs.inner_shape) == ("teacher_topk_logprobs", "float32", (4,))
    assert declared_by("loss_fn", loss).reads == teacher_topk_columns(2)


def test_a_mark_that_is_no_column_is_an_error() -> None:
    @writes("credit")  # type: ignore[arg-type]
    class Judge:
        pass

    with pytest.raises(ColumnError, match=r"env\.math: its attribute columns_written is \('credit',\)"):
        declared_by("env.math", Judge)
