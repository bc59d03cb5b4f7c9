"""The meanings are those of docs/reference/metrics.md, and names with placeholders are found."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nemo_like.data_plane.operations import Operation, operation_metrics
from nemo_like.observability.metric_meanings import meaning_of, metrics_page, with_meanings
from nemo_like.observability.progress import STEP_STAGES

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


def test_the_page_is_that_of_the_documentation() -> None:
    assert metrics_page() == PAGE


@pytest.mark.parametrize(
    ("metric", "meaning"),
    [
        ("train/reward", "mean raw reward of all samples of the step"),
        ("train/probs_ratio_min", "exp(logprob \N{MINUS SIGN} prev_logprob) per token, before clipping"),
        (
            "train/token_mult_prob_error",
            "mean over tokens of exp|generation \N{MINUS SIGN} prev log-prob|: 1 when trainer",
        ),
        ("train/env/a/reward", "mean reward of one environment"),
        ("train/env/a/reward/exact/match", "mean of one component"),
        ("train/env/a/num_failed_rewards/died", "samples that the environment could not judge, by kind"),
        ("train/env/a/moves", "what the environment itself measures"),
        ("validation/pass@16", "with n = grpo.num_val_generations_per_prompt above 1"),
        ("validation/hard/accuracy", "of one source: share of the judged answers"),
        ("performance/gpu/policy_worker/utilization", "share of the time in which a kernel ran"),
        ("weight_sync/canary_gap", "how far the worst engine's log-probs"),
        ("data_plane/put/bytes", "bytes moved between processes and storage"),
        ("data_plane/put/input_ids/bytes", "bytes of the column"),
    ],
)
def test_a_metric_is_explained_in_plain_text(metric: str, meaning: str) -> None:
    found = meaning_of(metric)
    assert found is not None and found.startswith(meaning)
    assert not re.search(r"[`\\]|\]\(", found)


@pytest.mark.parametrize("metric", ["train/no_such", "reward", "validation/no_such", "step"])
def test_what_the_page_does_not_have_is_not_explained(metric: str) -> None:
    assert meaning_of(metric) is None


def test_stages_and_operations_are_explained() -> None:
    put = Operation("put", {"input_ids": 8}, 1.0)
    names = [*(f"timing/train/{stage}" for stage in STEP_STAGES), *operation_metrics([put])]
    assert len(names) == len(STEP_STAGES) + 12
    assert [name for name in names if meaning_of(name) is None] == []


def test_metrics_are_sorted_as_the_page_is() -> None:
    names = ["data_plane/put/count", "own/thing", "validation/reward", "train/reward", "train/loss"]
    assert list(with_meanings(names)) == ["train/loss", "train/reward", "validation/reward", *names[:2]]


def test_no_name_is_in_two_rows() -> None:
    names: list[str] = []
    for section in re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        prefix = section.partition("\n")[0]
        rows = re.findall(r"^\| (`.+?`) \| ", section, re.MULTILINE)
        names += [f"{prefix} {name}" for row in rows for name in re.findall("`([^`]+)`", row)]
    assert len(names) > 100
    assert sorted(names) == sorted(set(names))
