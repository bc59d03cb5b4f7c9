"""Every case on every golden batch, by nemo_like's own loss, however the batch is split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_like.algorithms.options import ESTIMATOR_KINDS, LOSS_KINDS
from nemo_like.configuration import load_config
from tests.conformance import generate, ours
from tests.conformance.loss_configs import loss_config

DEMO = Path(__file__).parents[2] / "configs" / "grpo_arithmetic_cpu.yaml"
BATCHES = {one["name"]: one for one in generate.load("batches")}
CASES = {case["name"]: case for case in generate.load("cases")}
EXPECTED = generate.load("expected")
# Layouts take turns over the splits, so that each is met by every case.
LAYOUTS = dict(zip(BATCHES["ragged"]["splits"], 2 * [*ours.RowLayout], strict=True))
# Of each kind of split one is quick, on a batch that is hard for it.
QUICK = {"ragged": "two ranks", "masked": "two ranks", "all": "four ranks"}
ESTIMATORS = {
    "grpo": (),
    "grpo_not_normalized": ("grpo.normalize_rewards=false",),
    "grpo_leave_one_out": ("grpo.use_leave_one_out_baseline=true",),
    "grpo_clipped": ("grpo.advantage_clip_low=-0.5", "grpo.advantage_clip_high=0.5"),
    "rloo": ("grpo.adv_estimator.name=rloo",),
    "reinforce_plus_plus": ("grpo.adv_estimator.name=reinforce_plus_plus",),
    "reinforce_plus_plus_baseline": ("grpo.adv_estimator.name=reinforce_plus_plus_baseline",),
    "gdpo": ("grpo.adv_estimator.name=gdpo", "grpo.adv_estimator.reward_weights={right: 1.0, brief: 0.5}"),
}


def close(values: Any) -> Any:
    return pytest.approx(values, rel=2e-5, abs=2e-7)


def test_the_files_are_what_the_generator_makes() -> None:
    made = {one["name"]: one for one in generate.batches()}
    assert made == BATCHES
    assert {case["name"]: case for case in generate.cases()} == CASES


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in BATCHES]
)
def test_the_reference_gives_what_the_files_say(name: str) -> None:
    assert EXPECTED[name]["cases"].keys() == CASES.keys()
    for case in CASES.values():
        found, written = generate.expected(BATCHES[name], case), EXPECTED[name]["cases"][case["name"]]
        for key, values in written.items():
            assert found[key] == pytest.approx(values, rel=1e-6, abs=1e-9), (case["name"], key)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        pytest.param(name, split, marks=() if (name, split) in QUICK.items() else pytest.mark.slow)
        for name in BATCHES
        for split in LAYOUTS
    ],
)
def test_every_case_gives_its_loss_gradient_and_update(name: str, split: str) -> None:
    for case in CASES.values():
        found, written = ours.run(BATCHES[name], case, split, LAYOUTS[split]), EXPECTED[name]["cases"]
        assert found["loss"] == close(written[case["name"]]["loss"]), case["name"]
        assert found["gradient"] == close(written[case["name"]]["gradient"]), case["name"]
        assert found["update"] == pytest.approx(written[case["name"]]["update"], rel=1e-4, abs=3e-5), case[
            "name"
        ]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_every_estimator_gives_its_advantages(estimator: str) -> None:
    cfg = load_config(DEMO, ESTIMATORS[estimator]).grpo
    for name, one in BATCHES.items():
        expected = pytest.approx(EXPECTED[name]["advantages"][estimator], rel=1e-7, abs=1e-8)
        assert ours.advantages(one, cfg) == expected, name


def test_every_loss_and_every_estimator_has_its_rows() -> None:
    """But for those that need a teacher or a critic, which the batches do not have."""
    losses = {loss_config(case).kind for case in CASES.values()}
    assert losses == {*LOSS_KINDS.names()} - {"distillation"}
    estimators = {load_config(DEMO, arguments).grpo.adv_estimator.name for arguments in ESTIMATORS.values()}
    assert estimators == {*ESTIMATOR_KINDS.names()} - {"gae"}


def test_no_correction_and_no_term_is_without_effect_on_all_batches() -> None:
    for name in CASES:
        loss, mean, added = name.split("/")
        plain = f"{loss}/{mean}/none"
        if added == "none" or plain not in CASES:
            continue
        changes = [
            abs(batch["cases"][name]["loss"] - batch["cases"][plain]["loss"]) for batch in EXPECTED.values()
        ]
        assert max(changes) > 1e-3, name
