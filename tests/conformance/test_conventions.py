"""What explains other frameworks' numbers: without a convention the reference, with each another."""

from __future__ import annotations

import pytest
import torch

from tests.conformance import generate
from tests.conformance.adapters import Padded, run_split
from tests.conformance.ask import TOLERANCE, deviation_of
from tests.conformance.conventions import (
    CONVENTIONS,
    OF_ADVANTAGES,
    advantages_as,
    evaluate_as,
)
from tests.conformance.reference import advantages, evaluate

BATCHES = {one["name"]: one for one in generate.load("batches")}
CASES = {case["name"]: case for case in generate.load("cases")}
# Where each convention shows.
SHOWN = {
    "masked_count": ("masked", "ppo/sample/none"),
    "micro_batch_mean": ("ragged", "ppo/token/none"),
    "entropy_by_tokens": ("ragged", "ppo/sample/entropy"),
    "rejected_leave": ("ragged", "ppo/token/seq_mask"),
    "always_sample_mean": ("ragged", "sapo/token/none"),
    "no_ratio_limit": ("far", "ppo/token/none"),
    "sample_ratio_to_10": ("far", "ppo/token/none"),  # no sample's mean log-ratio is as large
    "weight_no_limit": ("far", "ppo/token/plain"),
    "weight_limit_once": ("far", "gspo/sample/plain"),
    "weight_by_sample": ("ragged", "ppo/token/seq_mask"),
    "upper_bound_only": ("ragged", "cispo/token/none"),
    "kl_path": ("ragged", "ppo/token/k3"),
    "kl_by_ratio": ("ragged", "ppo/token/k3"),
    "kl_no_limit": ("far", "ppo/token/k3"),
    "kl_limit_k3_only": ("far", "ppo/token/k2"),
}


def gap(one: dict, case: dict, split: str, names: tuple[str, ...]) -> float:
    expected = evaluate(torch.tensor(one["table"], dtype=torch.float64), one["samples"], case)
    return deviation_of(evaluate_as(one, case, split, names), expected)


@pytest.mark.parametrize("name", ["turns", "all"])
def test_without_conventions_it_is_the_reference(name: str) -> None:
    for case in CASES.values():
        assert gap(BATCHES[name], case, "two ranks", ()) <= TOLERANCE, case["name"]


def test_every_convention_is_shown() -> None:
    assert SHOWN.keys() == CONVENTIONS.keys()


@pytest.mark.parametrize("name", SHOWN)
def test_a_convention_gives_other_numbers(name: str) -> None:
    batch, case = SHOWN[name]
    assert gap(BATCHES[batch], CASES[case], "even", (name,)) > 1e-4


@pytest.mark.parametrize("estimator", ["grpo", "grpo_not_normalized", "rloo", "reinforce_plus_plus_baseline"])
def test_conventions_of_advantages_too(estimator: str) -> None:
    for one in BATCHES.values():
        expected = pytest.approx(advantages(one["samples"], estimator), abs=1e-9)
        assert advantages_as(one["samples"], estimator, ()) == expected
    samples = {name: one["samples"] for name, one in BATCHES.items()}
    for name, batch in (("masked_in_group", "masked"), ("alone_without_baseline", "groups")):
        other = advantages_as(samples[batch], estimator, (name,))
        assert other != pytest.approx(advantages(samples[batch], estimator), abs=1e-3), name
    assert OF_ADVANTAGES.keys() >= {"masked_in_group", "alone_without_baseline", "unbiased_whitening"}


def reinforce(padded: Padded) -> torch.Tensor:
    """A framework in a line: REINFORCE with the mean over all tokens, for gradients that ranks average."""
    per_token = -padded.columns["advantage"][:, None] * padded.logprobs * padded.mask
    return per_token.sum() / padded.whole["mask"].sum() * padded.num_ranks


@pytest.mark.parametrize("split", BATCHES["all"]["splits"])
@pytest.mark.parametrize("name", BATCHES)
def test_a_framework_that_is_right_is_found_equal(name: str, split: str) -> None:
    one, case = BATCHES[name], CASES["reinforce/token/none"]
    expected = evaluate(torch.tensor(one["table"], dtype=torch.float64), one["samples"], case)
    assert deviation_of(run_split(one, split, reinforce), expected) <= TOLERANCE
