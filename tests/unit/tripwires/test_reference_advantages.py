"""Advantages from their formulas: worked by hand, and the same as training's own on random rewards."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from nemo_like.algorithms.estimators import AdvantageInputs, KLToGo, build_estimator
from nemo_like.algorithms.options import GRPOConfig
from nemo_like.configuration import load_config
from nemo_like.tripwires.reference_advantages import RewardedSamples, reference_advantages

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "grpo_arithmetic_cpu.yaml"


def grpo(*overrides: str) -> GRPOConfig:
    return load_config(CONFIG, overrides).grpo


def samples(rewards: list[float], groups: list[int], trains: list[bool] | None = None) -> RewardedSamples:
    count = len(rewards)
    trains = trains or [True] * count
    return RewardedSamples(rewards=rewards, groups=groups, trains=trains, num_tokens=[1.0] * count)


def test_grpo_divides_by_the_deviation_of_the_group() -> None:
    # Mean 1/4 and unbiased variance 1/4; the second group is uniform.
    found = reference_advantages(samples([1, 0, 0, 0, 1, 1], [7, 7, 7, 7, 8, 8]), grpo())
    assert found == pytest.approx([1.5, -0.5, -0.5, -0.5, 0, 0], abs=1e-5)


def test_a_masked_sample_counts_nowhere() -> None:
    found = reference_advantages(
        samples([1, 0, 9], [1, 1, 1], [True, True, False]), grpo("grpo.normalize_rewards=false")
    )
    assert found == [0.5, -0.5, 0.0]


def test_with_leave_one_out_equal_others_have_no_deviation_to_divide_by() -> None:
    found = reference_advantages(samples([1, 0, 0, 0], [1] * 4), grpo("grpo.use_leave_one_out_baseline=true"))
    assert found is not None
    assert found[0] == 1.0
    third = 1 / math.sqrt(3)
    assert found[1] == pytest.approx(-(1 / 3) / third, abs=1e-5)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    found = reference_advantages(samples([3, 0, 0], [1, 1, 1]), grpo("grpo.adv_estimator.name=rloo"))
    assert found == [3.0, -1.5, -1.5]


def test_a_users_own_estimator_has_no_reference() -> None:
    cfg = grpo()
    cfg.adv_estimator.name = "mine:estimate"
    assert reference_advantages(samples([1, 0], [0, 0]), cfg) is None


WHITENING = ("grpo.adv_estimator.name=reinforce_plus_plus",)
WHITENING_WITH_BASELINE = ("grpo.adv_estimator.name=reinforce_plus_plus_baseline",)


@pytest.mark.parametrize(
    ("overrides", "with_kl"),
    [
        ((), False),
        (("grpo.normalize_rewards=false",), False),
        (("grpo.use_leave_one_out_baseline=true",), False),
        (("grpo.advantage_clip_low=-0.3", "grpo.advantage_clip_high=0.8"), False),
        (("grpo.adv_estimator.name=rloo",), False),
        (WHITENING, False),
        (WHITENING, True),
        (WHITENING_WITH_BASELINE, False),
        (WHITENING_WITH_BASELINE, True),
        (("grpo.adv_estimator.name=gdpo", "grpo.adv_estimator.reward_weights={a: 1.0, b: 0.5}"), False),
    ],
)
def test_they_are_those_of_training(overrides: tuple[str, ...], with_kl: bool) -> None:
    cfg, rng = grpo(*overrides), random.Random(0)
    count = 24
    rewards = [rng.choice([0.0, 0.0, 1.0, 0.3]) for _ in range(count)]
    trains = [rng.random() > 0.2 for _ in range(count)]
    tokens = [float(rng.randint(1, 9)) for _ in range(count)]
    groups = [i // 4 for i in range(count)]
    components = {name: [rng.random() for _ in range(count)] for name in "ab"}
    components["b"][3] = components["b"][10] = math.nan  # abstains
    sums, squares = [rng.random() for _ in range(count)], [rng.random() for _ in range(count)]
    own = build_estimator(cfg)(
        AdvantageInputs(
            rewards=rewards,
            group_ids=groups,
            sample_mask=[float(one) for one in trains],
            num_response_tokens=tokens,
            components=components,
            kl=KLToGo(coefficient=0.1, sums=sums, square_sums=squares) if with_kl else None,
        )
    )
    found = reference_advantages(
        RewardedSamples(
            rewards=rewards,
            groups=groups,
            trains=trains,
            num_tokens=tokens,
            components=components,
            kl_coefficient=0.1 if with_kl else 0.0,
            kl_sums=sums,
            kl_square_sums=squares,
        ),
        cfg,
    )
    assert found == pytest.approx(list(own.per_sample), abs=1e-9)
