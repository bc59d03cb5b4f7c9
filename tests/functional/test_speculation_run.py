"""A whole run whose engines draft: it learns as without drafts, and says how many tokens were kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.functional.runs import FEWEST_PROCESSES, SCORED, FinishedRun, run_grpo

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_run, pytest.mark.slow]

NUM_STEPS = 20
STEPS = [f"grpo.max_num_steps={NUM_STEPS}", *FEWEST_PROCESSES, SCORED]
BY_TOKENS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2, "prompt_lookup_min": 1}
METRICS = ("draft_acceptance_rate", "draft_acceptance_length")


def drafting(drafts: Mapping[str, str | int]) -> str:
    given = ", ".join(f"{name}: {value}" for name, value in drafts.items())
    return f"generation.vllm_kwargs={{speculative_config: {{{given}}}}}"


@pytest.fixture(scope="module")
def runs(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, FinishedRun]:
    by_model = {"method": "draft_model", "model": arithmetic_model, "num_speculative_tokens": 2}
    short = ["grpo.max_num_steps=3", "grpo.val_at_start=false", "grpo.val_at_end=false"]
    more: dict[str, list[str]] = {
        "plain": [],
        "by_tokens": [drafting(BY_TOKENS)],
        "again": [drafting(BY_TOKENS), *short],
        "by_model": [drafting(by_model), *short],
    }
    path: Path = tmp_path_factory.mktemp("runs")
    done = {name: run_grpo(path / name, [*STEPS, *own]) for name, own in more.items()}
    for run in done.values():
        assert run.returncode == 0, run.output
    return done


def test_a_run_learns_with_drafts_as_without(runs: dict[str, FinishedRun]) -> None:
    first = {name: run.metrics("train/reward")[0] for name, run in runs.items()}
    assert all(abs(reward - first["plain"]) < 0.05 for reward in first.values())
    for name in ("plain", "by_tokens"):
        accuracies = runs[name].metrics("validation/accuracy")
        assert accuracies[-1] > accuracies[0] + 0.12


def test_trainer_and_engines_agree_on_every_step(runs: dict[str, FinishedRun]) -> None:
    for name, num_steps in (("by_tokens", NUM_STEPS), ("by_model", 3)):
        errors = runs[name].metrics("train/token_mult_prob_error")
        assert len(errors) == num_steps
        assert max(errors) < 1.00002


def test_a_run_says_how_many_tokens_of_its_drafts_were_kept(runs: dict[str, FinishedRun]) -> None:
    """Sums repeat few of their prompts' digits; a draft of the policy's first weights knows most of them."""
    kept = {}
    for name, num_steps in (("by_tokens", NUM_STEPS), ("by_model", 3)):
        rates, lengths = (runs[name].metrics(f"performance/{metric}") for metric in METRICS)
        assert (len(rates), len(lengths)) == (num_steps, num_steps)
        assert all(0 < rate < 1 for rate in rates)
        assert all(1 < length < 3 for length in lengths)
        kept[name] = sum(rates) / num_steps
    assert kept["by_model"] > 0.4
    assert kept["by_tokens"] < 0.1
    assert not [one for record in runs["plain"].records() for one in record if "draft_" in one]


def test_the_same_seed_gives_the_same_run(runs: dict[str, FinishedRun]) -> None:
    for metric in ("train/reward", "train/loss", "train/grad_norm"):
        assert runs["again"].metrics(metric) == runs["by_tokens"].metrics(metric)[:3]
