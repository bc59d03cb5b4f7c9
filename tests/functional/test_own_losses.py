"""Losses, estimators and filters of a user's own in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional.runs import run_grpo
from tests.functional.test_own_columns import NUM_GENERATIONS, NUM_PROMPTS, SMALL

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run, pytest.mark.slow]

MODULE = "tests.functional.own_losses"


def test_a_loss_an_estimator_and_a_filter_of_one_s_own_train(arithmetic_model: str, tmp_path: Path) -> None:
    overrides = [
        f"loss_fn.kind={MODULE}:gated",
        "++loss_fn.arguments.tau=2.0",
        f"grpo.adv_estimator.name='{MODULE}:per_length'",
        "++grpo.adv_estimator.arguments.power=0.5",
        f"grpo.sample_filters=['{MODULE}:every_second']",
    ]
    run = run_grpo(tmp_path, [*SMALL, *overrides])
    assert run.returncode == 0, run.output
    num_samples = NUM_PROMPTS * NUM_GENERATIONS
    assert run.metrics("train/num_filtered") == [num_samples / 2] * 2
    assert run.metrics("train/global_valid_seqs") == [num_samples / 2] * 2
    assert min(run.metrics("train/grad_norm")) > 0


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            [f"loss_fn.kind={MODULE}:of_tokens"],
            ["step 1: loss_fn.kind=tests.functional.own_losses:of_tokens returned the shapes {'loss': ["],
        ),
        (
            [f"loss_fn.kind={MODULE}:not_a_number"],
            ["step 1, sample ", " of prompt ", "returned a loss of ", "at generated token ", "deserved="],
        ),
        (
            [f"loss_fn.kind={MODULE}:not_a_number", "policy.sequence_packing.share_prompts=false"],
            ["step 1, sample ", " of prompt ", "returned a loss of "],
        ),
        (
            [f"loss_fn.kind={MODULE}:misspelt"],
            ["step 1: ", "it does not read the column 'deserves', only deserved; did you mean 'deserved'?"],
        ),
        (
            [f"loss_fn.kind={MODULE}:gated", "++loss_fn.arguments.tua=1.0"],
            ["unexpected keyword argument 'tua'", "did you mean tau?"],
        ),
    ],
    ids=["shape", "not finite", "not finite, prompts not shared", "missing column", "argument"],
)
def test_a_wrong_loss_ends_the_run_with_what_and_where(
    arithmetic_model: str, tmp_path: Path, overrides: list[str], messages: list[str]
) -> None:
    run = run_grpo(tmp_path, [*SMALL, *overrides])
    assert run.returncode in (1, 2)
    for message in messages:
        assert message in run.output
