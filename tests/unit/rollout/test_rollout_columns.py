"""Which columns the parts of a rollout write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.batch.columns import MESSAGES, Column, ColumnError, Layout, gather_columns
from nemo_like.configuration import Config
from nemo_like.policy.batch.policy_columns import model_reads, policy_declarations
from nemo_like.rollout.rollout_columns import record_column, rollout_declarations
from tests.unit.config.checkpoints import write_checkpoint

Demo = Callable[..., Config]


@pytest.mark.parametrize(
    ("text", "column"),
    [
        ("float32", Column("a", "float32", Layout.per_sample, per_prompt=True)),
        ("uint8[32, 3]", Column("a", "uint8", Layout.per_sample, inner_shape=(32, 3), per_prompt=True)),
        ("per_token int16[2]", Column("a", "int16", Layout.per_token, inner_shape=(2,))),
        ("ragged", Column("a", "", Layout.ragged, per_prompt=True)),
        ("objects", Column("a", "", Layout.objects, per_prompt=True)),
    ],
)
def test_a_field_s_column_is_written_as_a_word(text: str, column: Column) -> None:
    assert record_column("a", text) == column


def test_records_and_environments_write_beside_the_rollout_and_the_engines(
    demo: Demo, tmp_path: Path
) -> None:
    train = f"{{kind: jsonl, path: {tmp_path / 'none.jsonl'}, columns: {{level: float32}}}}"
    cfg = demo(f"data.train={train}")
    credit = Column("credit", "float32", Layout.per_token)
    declarations = rollout_declarations(cfg, {"math": (credit,)})
    assert [(one.part, [column.name for column in one.writes]) for one in declarations] == [
        ("rollout", ["input_ids", "response_mask"]),
        ("generation", ["generation_logprobs"]),
        ("data.train", ["level"]),
        ("env.math", ["credit"]),
    ]
    with pytest.raises(ColumnError, match=r"'level' is written by data\.train and by env\.math"):
        gather_columns(rollout_declarations(cfg, {"math": (record_column("level", "float32"),)}))


def test_conversations_are_a_column_when_asked_for(demo: Demo) -> None:
    parts = {one.part: one.writes for one in rollout_declarations(demo("rollout.keep_messages=true"), {})}
    assert parts["rollout.keep_messages"] == (MESSAGES,)
    assert not any(MESSAGES in one.writes for one in rollout_declarations(demo(), {}))


def test_what_serves_validation_alone_does_not_train(demo: Demo, tmp_path: Path) -> None:
    path = tmp_path / "none.jsonl"
    cfg = demo(f"data.validation={{kind: jsonl, path: {path}, env: other, columns: {{level: float32}}}}")
    credit = Column("credit", "float32", Layout.per_token)
    declarations = rollout_declarations(cfg, {"arithmetic": (credit,), "other": (credit,)})
    assert {one.part: one.trains for one in declarations[2:]} == {
        "data.validation": False,
        "env.arithmetic": True,
        "env.other": False,
    }


def test_engines_write_the_experts_that_a_policy_replays(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(
        checkpoint, model_type="qwen3_moe", num_experts=6, num_experts_per_tok=2, moe_intermediate_size=8
    )
    cfg = demo("policy.megatron_cfg.router_replay=true")
    (experts,) = (
        one
        for one in gather_columns(rollout_declarations(cfg, {}))
        if one.writer == "generation" and one.name == "routed_experts"
    )
    assert model_reads(cfg.policy) == (experts,)
    training = policy_declarations(cfg.loss_fn, (), model_reads(cfg.policy))
    assert experts in gather_columns([*rollout_declarations(cfg, {}), *training])
    with pytest.raises(ColumnError, match="'routed_experts' is read by policy, and nobody writes it"):
        gather_columns([*rollout_declarations(demo(), {}), *training])


def test_what_judges_the_same_samples_writes_columns_of_different_names(demo: Demo) -> None:
    components = "{first: 1.0, second: 0.5}"
    cfg = demo(
        *("env@env.first=exact_match", "env@env.second=exact_match", "env.arithmetic.kind=weighted_sum"),
        f"++env.arithmetic.options={{components: {components}}}",
    )
    credit = Column("credit", "float32", Layout.per_token)
    message = "'credit' is written by env.first and by env.second, which both judge the samples of env.arithm"
    with pytest.raises(ColumnError, match=message):
        rollout_declarations(cfg, {"first": (credit,), "second": (credit,)})
    assert rollout_declarations(cfg, {"first": (credit,), "second": ()})
