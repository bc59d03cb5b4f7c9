"""What an evaluation reports: the validation's numbers, with errors, by set, task and difficulty."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.configuration import load_config
from nemo_like.driver.evaluation import ReportedGroup, evaluation_table, reported_groups
from nemo_like.driver.validation import ValidationSet, validation_report
from tests.unit.driver.test_validation import answered

REPOSITORY = Path(__file__).resolve().parents[3]
SETS = [ValidationSet("easy", (0, 1)), ValidationSet("hard", (7,))]


@pytest.fixture(scope="module")
def cfg() -> GRPOConfig:
    grpo = load_config(REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml").grpo
    return replace(grpo, num_val_generations_per_prompt=2)


def tagged(rewards: list[float | None], tasks: str, difficulties: list[str]) -> KVBatchMeta:
    batch = answered(rewards, size=2).batch
    tags = {"task": tuple(tasks), "difficulty": tuple(difficulties)}
    return replace(batch, tags={**batch.tags, **tags})


def names(groups: list[ReportedGroup]) -> list[tuple[str, str]]:
    return [(one.by, one.name) for one in groups]


def test_every_number_is_that_of_the_validation(cfg: GRPOConfig) -> None:
    result = answered([1.0, 0.0, 1.0, 1.0, None, 0.0], size=2)
    batch = tagged([1.0, 0.0, 1.0, 1.0, None, 0.0], "aaaaaa", [""] * 6)
    metrics = validation_report(result, SETS, cfg, {}).metrics
    groups = [*reported_groups(batch, SETS, cfg)]
    assert names(groups) == [("all", "all"), ("set", "easy"), ("set", "hard")]
    for group, prefix in zip(groups, ("", "easy/", "hard/"), strict=True):
        assert group.estimates
        for name, estimate in group.estimates.items():
            assert estimate.value == metrics[f"validation/{prefix}{name}"]
    everything, easy, hard = groups
    assert (everything.num_problems, everything.num_answers, everything.num_failed_rewards) == (3, 6, 1)
    assert easy.estimates["pass@2"].value == 1.0
    assert hard.estimates["accuracy"].interval is None
    assert "pass@2" not in hard.estimates


def test_tasks_and_difficulties_are_told_apart_and_together(cfg: GRPOConfig) -> None:
    batch = tagged([1.0, 1.0, 0.0, 0.0, 1.0, 0.0], "aabbbb", ["2", "2", "10", "10", "2", "2"])
    groups = [*reported_groups(batch, [ValidationSet("one", (0, 1, 2))], cfg)]
    assert names(groups) == [
        ("all", "all"),
        ("task", "a"),
        ("task", "b"),
        ("difficulty", "2"),  # numbers by their size
        ("difficulty", "10"),
        ("task and difficulty", "a, 2"),
        ("task and difficulty", "b, 10"),
        ("task and difficulty", "b, 2"),
    ]
    assert [one.estimates["accuracy"].value for one in groups] == [0.5, 1.0, 0.25, 0.75, 0.0, 1.0, 0.0, 0.5]


def test_the_table_has_a_line_for_each_group_with_intervals(cfg: GRPOConfig) -> None:
    batch = tagged([1.0, 1.0, 0.0, 0.0, 1.0, 0.0], "aaaaaa", ["", "", "x", "x", "x", "x"])
    groups = [*reported_groups(batch, [ValidationSet("one", (0, 1, 2))], cfg)]
    _, head, everything, none, hard, _, method = evaluation_table(groups)
    assert head.split() == ["problems", "accuracy", "pass@1", "pass@2", "mean@2", "majority@2"]
    # Of three problems one is solved always, one never, one in half of its answers.
    assert everything.split()[:5] == ["all", "3", "0.500", "[0.052,", "0.948]"]
    assert none.split()[:4] == ["difficulty", "(none)", "1", "1.000"]
    assert hard.startswith("difficulty x")
    assert "clustered by problem" in method


def test_a_group_that_nobody_could_judge_has_dashes(cfg: GRPOConfig) -> None:
    batch = tagged([1.0, 1.0, None, None], "aaaa", ["p", "p", "q", "q"])
    *_, unjudged, _, _ = evaluation_table([*reported_groups(batch, [ValidationSet("one", (0, 1))], cfg)])
    assert unjudged.split() == ["difficulty", "q", "1", "-", "-", "-", "-", "-"]
