from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.advantage_estimators import reinforce_plus_plus as plain
from nemo_like.algorithms.advantage_estimators import reinforce_plus_plus_baseline as with_baseline
from nemo_like.algorithms.advantage_estimators import rloo as leave_one_out
from nemo_like.algorithms.advantage_estimators.gae import gae
from nemo_like.algorithms.advantage_estimators.gdpo import normalized_sum as gdpo
from nemo_like.algorithms.estimators import AdvantageInputs, Advantages, KLToGo, TokenSums, build_estimator
from nemo_like.algorithms.options import ESTIMATOR_KINDS, GRPOConfig
from nemo_like.configuration import load_config

UNUSED: Any = None  # the section grpo, for estimators that read none of it
REPOSITORY = Path(__file__).resolve().parents[3]


def inputs(rewards, group_ids=None, mask=None, tokens=None, **components):
    count = len(rewards)
    return AdvantageInputs(
        rewards=rewards,
        group_ids=group_ids or ["a"] * count,
        sample_mask=mask or [1] * count,
        num_response_tokens=tokens or [1] * count,
        components=components,
    )


def rloo(batch):
    return leave_one_out.rloo(batch, UNUSED)


def reinforce_plus_plus(batch):
    return plain.reinforce_plus_plus(batch, UNUSED).per_sample


def reinforce_plus_plus_baseline(batch):
    return with_baseline.reinforce_plus_plus_baseline(batch, UNUSED).per_sample


@pytest.fixture(scope="module")
def grpo_config() -> Callable[..., GRPOConfig]:
    def load(*overrides: str) -> GRPOConfig:
        return load_config(REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml", overrides).grpo

    return load


def test_rloo_subtracts_the_mean_of_the_other_rewards():
    # Others of 1: [0, 0, 1]; of the last 1: [1, 0, 0]; of a 0: [1, 0, 1].
    assert rloo(inputs([1.0, 0.0, 0.0, 1.0])) == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_rloo_gives_nothing_to_a_sample_without_others():
    assert rloo(inputs([1.0, 5.0], ["a", "b"])) == [0.0, 0.0]
    assert rloo(inputs([1.0, 5.0], mask=[1, 0])) == [0.0, 0.0]


def test_reinforce_plus_plus_whitens_over_tokens_across_groups():
    # Token-weighted mean (3 * 2 + 1 * 6) / 4 = 3; variance (3 * 1 + 1 * 9) / 4 = 3.
    result = reinforce_plus_plus(inputs([2.0, 6.0], ["a", "b"], tokens=[3, 1]))
    assert result == pytest.approx([-1 / math.sqrt(3), 3 / math.sqrt(3)])


def test_reinforce_plus_plus_baseline_whitens_what_is_left_above_the_group():
    # Group a: [0, 2] - 1; group b: [5, 5] - 5. Values -1, 1, 0, 0, one token each: mean 0, variance 1/2.
    result = reinforce_plus_plus_baseline(inputs([0.0, 2.0, 5.0, 5.0], ["a", "a", "b", "b"]))
    assert result == pytest.approx([-math.sqrt(2), math.sqrt(2), 0.0, 0.0])


def test_a_longer_response_weighs_more_in_the_whitening():
    # Centred -1 and 1 with 3 and 1 tokens: mean -1/2, variance (3 * 1/4 + 9/4) / 4 = 3/4.
    result = reinforce_plus_plus_baseline(inputs([0.0, 2.0], tokens=[3, 1]))
    assert result == pytest.approx([-0.5 / math.sqrt(0.75), 1.5 / math.sqrt(0.75)])


def test_a_kl_in_the_reward_is_part_of_what_is_whitened():
    # beta 1/2. The first sample has two tokens of KL to go 2 and 1, so returns 3 - 1 and 3 - 1/2; the second
    # one token of KL to go 3, return 1 - 3/2. Mean of 2, 2.5, -0.5: 4/3; of their squares: 10.5 / 3.
    kl = KLToGo(coefficient=0.5, sums=[3.0, 3.0], square_sums=[5.0, 9.0])
    result = plain.reinforce_plus_plus(replace(inputs([3.0, 1.0], tokens=[2, 1]), kl=kl), UNUSED)
    std = math.sqrt(3.5 - 16 / 9)
    of_tokens = [
        result.per_sample[sample] - result.kl_scale * to_go for sample, to_go in [(0, 2), (0, 1), (1, 3)]
    ]
    assert of_tokens == pytest.approx([(x - 4 / 3) / std for x in (2.0, 2.5, -0.5)])


def test_a_kl_tells_equal_rewards_apart_and_a_masked_one_counts_nothing():
    kl = KLToGo(coefficient=1.0, sums=[2.0, 0.0, math.nan], square_sums=[4.0, 0.0, math.nan])
    batch = replace(inputs([1.0, 1.0, 1.0], ["a", "a", "b"], mask=[1, 1, 0]), kl=kl)
    for estimate in (plain.reinforce_plus_plus, with_baseline.reinforce_plus_plus_baseline):
        # Returns -1 and 1 around their mean.
        result = estimate(batch, UNUSED)
        assert result.per_sample == pytest.approx([1.0, 1.0, 0.0])
        assert result.kl_scale == pytest.approx(1.0)


@pytest.mark.parametrize("estimate", [rloo, reinforce_plus_plus, reinforce_plus_plus_baseline])
class TestEdges:
    @pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
    def test_equal_rewards_give_exactly_zero(self, estimate, value):
        assert estimate(inputs([value] * 49, tokens=[7] * 49)) == [0.0] * 49

    def test_a_single_sample_has_zero_advantage(self, estimate):
        assert estimate(inputs([5.0])) == [0.0]

    def test_a_masked_nan_gets_zero_and_moves_nobody(self, estimate):
        with_nan = estimate(inputs([1.0, math.nan, 0.0], mask=[1, 0, 1], tokens=[2, 9, 3]))
        assert [with_nan[0], with_nan[2]] == pytest.approx(estimate(inputs([1.0, 0.0], tokens=[2, 3])))
        assert with_nan[1] == 0.0

    def test_an_unmasked_nan_is_an_error_that_names_the_sample(self, estimate):
        with pytest.raises(ValueError, match="reward of sample 1 is nan; mask the sample"):
            estimate(inputs([1.0, math.nan, 0.0]))

    def test_all_masked_gives_zero_everywhere(self, estimate):
        assert estimate(inputs([1.0, 0.0], mask=[0, 0])) == [0.0, 0.0]

    def test_an_empty_batch_gives_nothing(self, estimate):
        assert estimate(inputs([])) == []


def test_empty_responses_alone_have_nothing_to_whiten():
    assert reinforce_plus_plus(inputs([1.0, 0.0], tokens=[0, 0])) == [0.0, 0.0]


def test_gdpo_normalises_each_component_in_its_group_and_the_sum_over_the_batch():
    # correct: [1, 0] has mean 1/2 and std sqrt(1/2), so +-1/sqrt(2) (but for the epsilon); format is uniform
    # in group a and [0, 1] in group b. With weights 1 and 2: sums [s, -s, -2s, 2s], s = 1/sqrt(2),
    # of mean 0 and unbiased variance (2 * 1/2 + 2 * 4/2) / 3 = 5/3.
    result = gdpo(
        inputs(
            [0.0] * 4,
            ["a", "a", "b", "b"],
            correct=[1.0, 0.0, 1.0, 1.0],
            format=[1.0, 1.0, 0.0, 1.0],
        ),
        {"correct": 1.0, "format": 2.0},
    )
    unit = math.sqrt(1 / 2) / math.sqrt(5 / 3)
    assert result == pytest.approx([unit, -unit, -2 * unit, 2 * unit], rel=1e-4)


def test_gdpo_leaves_a_component_that_abstains_out_of_its_statistics_and_of_that_sample():
    # correct abstains for the last sample and the second is masked, so it has one sample left, and adds 0.
    # format is [0, 1] over the first and the last: -+1/sqrt(2), whose mean is 0 and whose std is 1.
    result = gdpo(
        inputs([0.0] * 3, mask=[1, 0, 1], correct=[1.0, 0.0, math.nan], format=[0.0, 1.0, 1.0]),
        {"correct": 1.0, "format": 1.0},
    )
    assert result == pytest.approx([-math.sqrt(1 / 2), 0.0, math.sqrt(1 / 2)], rel=1e-4)
    result = gdpo(inputs([0.0] * 3, correct=[1.0, 0.0, math.nan]), {"correct": 1.0})
    # +-1/sqrt(2) and 0 for the one that abstains; their unbiased std over all three is 1/sqrt(2).
    assert result == pytest.approx([1.0, -1.0, 0.0], rel=1e-4)
    assert gdpo(inputs([0.0] * 2, correct=[math.nan] * 2), {"correct": 1.0}) == [0.0, 0.0]


def test_gdpo_tells_apart_what_has_the_same_sum():
    # Alone each is 1 in sum; normalised, the rare one is (0.75, -0.25, ...) / 0.5 and the frequent one
    # +-0.5 / sqrt(1/3). Sums 0.634, 0.366, 0.366, -1.366 of mean 0 and std 0.919.
    rare, frequent = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.0, 0.0]
    result = gdpo(inputs([0.0] * 4, rare=rare, frequent=frequent), {"rare": 1.0, "frequent": 1.0})
    assert result == pytest.approx([0.6896, 0.3981, 0.3981, -1.4858], abs=1e-4)


@pytest.mark.parametrize("mask", [[1, 1, 1, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
def test_gdpo_of_uniform_masked_or_single_samples_is_zero(mask):
    uniform = inputs([0.0] * 4, mask=mask, correct=[0.1] * 4)
    assert gdpo(uniform, {"correct": 1.0}) == [0.0] * 4


def test_gdpo_names_a_component_that_the_samples_lack():
    with pytest.raises(ValueError, match=r"names correkt, which the samples do not have; they have correct"):
        gdpo(inputs([0.0], correct=[1.0]), {"correkt": 1.0})


def first_is_one(batch: AdvantageInputs, cfg: GRPOConfig) -> list[float]:
    """A user's own estimator."""
    return [1.0, *[0.0] * (len(batch.rewards) - 1)]


def scaled_tokens(batch: AdvantageInputs, cfg: GRPOConfig) -> Advantages:
    return Advantages([0.0] * len(batch.rewards), token_scale=2.0)


def one_too_few(batch: AdvantageInputs, cfg: GRPOConfig) -> list[float]:
    return [0.0] * (len(batch.rewards) - 1)


def no_sequence(batch: AdvantageInputs, cfg: GRPOConfig) -> None:
    return None


def times(batch: AdvantageInputs, cfg: GRPOConfig, factor: float) -> list[float]:
    return [factor * reward for reward in batch.rewards]


def not_a_number(batch: AdvantageInputs, cfg: GRPOConfig) -> list[float]:
    return [math.nan] * len(batch.rewards)


@pytest.mark.parametrize("name", ESTIMATOR_KINDS.names())
def test_every_name_of_the_configuration_has_an_estimator(grpo_config, name):
    cfg = grpo_config(f"grpo.adv_estimator.name={name}", "++grpo.adv_estimator.reward_weights.correct=1.0")
    of_tokens = [1.0, 0.0, 0.0]
    batch = inputs([1.0, 0.0, 0.0], correct=[1.0, 0.0, 0.0])
    batch = replace(batch, of_tokens=TokenSums(sums=of_tokens, square_sums=of_tokens))
    found = build_estimator(cfg)(batch)
    result = [
        shift + (found.token_scale or 0.0) * own
        for shift, own in zip(found.per_sample, of_tokens, strict=True)
    ]
    assert result[0] > 0 > result[1] == result[2]


def test_options_of_grpo_reach_its_estimator(grpo_config):
    rewards = inputs([1.0, 0.0, 0.0, 0.0])
    plain = build_estimator(grpo_config("grpo.normalize_rewards=false"))
    assert plain(rewards).per_sample == [0.75, -0.25, -0.25, -0.25]
    others = build_estimator(
        grpo_config("grpo.normalize_rewards=false", "grpo.use_leave_one_out_baseline=true")
    )
    assert others(rewards).per_sample == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_advantages_are_clipped_on_either_side(grpo_config):
    cfg = grpo_config(
        "grpo.normalize_rewards=false", "grpo.advantage_clip_low=-0.2", "grpo.advantage_clip_high=0.5"
    )
    assert build_estimator(cfg)(inputs([1.0, 0.0, 0.0, 0.0])).per_sample == [0.5, -0.2, -0.2, -0.2]
    upper = build_estimator(grpo_config("grpo.normalize_rewards=false", "grpo.advantage_clip_high=0.5"))
    assert upper(inputs([1.0, 0.0, 0.0, 0.0])).per_sample == [0.5, -0.25, -0.25, -0.25]


def test_an_estimator_of_ones_own_is_found_by_import_path(grpo_config):
    estimate = build_estimator(grpo_config(f"grpo.adv_estimator.name='{__name__}:first_is_one'"))
    assert estimate(inputs([0.0, 0.0])).per_sample == [1.0, 0.0]


def test_an_estimator_gets_the_arguments_of_the_configuration(grpo_config):
    own = f"grpo.adv_estimator.name='{__name__}:times'"
    estimate = build_estimator(grpo_config(own, "++grpo.adv_estimator.arguments.factor=3"))
    assert estimate(inputs([1.0, 0.5])).per_sample == [3.0, 1.5]


@pytest.mark.parametrize(
    ("function", "finding"),
    [
        ("one_too_few", "gave 1 advantages for 2"),
        ("not_a_number", "2 advantages that are not finite, the first of them nan for sample 0 of group a"),
        ("no_sequence", "returned NoneType, not one float per sample"),
        ("scaled_tokens", "gave token_scale=2.0, .* and only a critic gives these; leave it out"),
    ],
)
def test_what_an_estimator_of_ones_own_gives_is_checked(grpo_config, function, finding):
    estimate = build_estimator(grpo_config(f"grpo.adv_estimator.name='{__name__}:{function}'"))
    with pytest.raises(ValueError, match=finding):
        estimate(inputs([0.0, 0.0]))


samples = st.lists(
    st.tuples(st.integers(-5, 5), st.integers(0, 3), st.integers(1, 9), st.booleans()),
    min_size=1,
    max_size=20,
)


@given(samples)
def test_whitened_advantages_have_token_weighted_mean_zero_and_variance_one(batch):
    rewards, groups, tokens, mask = (list(column) for column in zip(*batch, strict=True))
    result = reinforce_plus_plus(inputs([float(r) for r in rewards], groups, mask, tokens))
    valid = [i for i, kept in enumerate(mask) if kept]
    total = sum(tokens[i] for i in valid)
    assert all(result[i] == 0.0 for i in range(len(mask)) if not mask[i])
    if len({rewards[i] for i in valid}) > 1:
        assert sum(tokens[i] * result[i] for i in valid) / total == pytest.approx(0.0, abs=1e-9)
        assert sum(tokens[i] * result[i] ** 2 for i in valid) / total == pytest.approx(1.0)


@given(samples, st.randoms(use_true_random=False))
def test_the_order_of_the_samples_does_not_matter(batch, random):
    order = list(range(len(batch)))
    random.shuffle(order)

    def gathered(positions):
        rewards, groups, tokens, mask = zip(*(batch[i] for i in positions), strict=True)
        values = [float(reward) for reward in rewards]
        return inputs(values, list(groups), list(mask), list(tokens), correct=values)

    for estimate in (reinforce_plus_plus_baseline, lambda batch: gdpo(batch, {"correct": 1.0})):
        result = estimate(gathered(range(len(batch))))
        shuffled = estimate(gathered(order))
        assert shuffled == pytest.approx([result[i] for i in order], rel=1e-9, abs=1e-9)


def of_tokens(advantages, mask=None):
    """Inputs of samples whose tokens have these advantages of their own."""
    return replace(
        inputs([0.0] * len(advantages), mask=mask, tokens=[len(sample) for sample in advantages]),
        of_tokens=TokenSums(
            sums=[math.fsum(sample) for sample in advantages],
            square_sums=[math.fsum(token * token for token in sample) for sample in advantages],
        ),
    )


def whitened(advantages, result):
    """The advantages of all tokens, by sample."""
    return [
        [shift + result.token_scale * token for token in sample]
        for sample, shift in zip(advantages, result.per_sample, strict=True)
    ]


def test_gae_whitens_the_advantages_of_tokens():
    # Tokens 1, 3, 8: mean 4, variance (9 + 1 + 16) / 3.
    result = gae(of_tokens([[1.0, 3.0], [8.0]]), UNUSED)
    std = math.sqrt(26 / 3)
    assert result.token_scale == pytest.approx(1 / std)
    assert result.per_sample == pytest.approx([-4 / std, -4 / std])
    assert result.kl_scale == 0


TOKENS = st.lists(st.floats(-100, 100), max_size=6)


@settings(max_examples=200)
@given(st.lists(st.tuples(TOKENS, st.booleans()), min_size=1, max_size=8))
def test_gae_gives_tokens_that_train_mean_0_and_variance_1_whatever_masked_samples_hold(samples):
    advantages = [tokens if kept else [math.nan] * len(tokens) for tokens, kept in samples]
    mask = [float(kept) for _, kept in samples]
    result = gae(of_tokens(advantages, mask), UNUSED)
    assert [shift for shift, kept in zip(result.per_sample, mask, strict=True) if not kept] == [0.0] * (
        len(mask) - int(sum(mask))
    )
    plain = [token for tokens, kept in samples if kept for token in tokens]
    found = [
        token
        for sample, kept in zip(whitened(advantages, result), mask, strict=True)
        if kept
        for token in sample
    ]
    if not plain:
        assert result.token_scale == 0
        return
    spread = math.fsum((token - math.fsum(plain) / len(plain)) ** 2 for token in plain) / len(plain)
    assert math.fsum(found) / len(found) == pytest.approx(0, abs=1e-6)
    if spread > 1e-3:
        assert math.fsum(token * token for token in found) / len(found) == pytest.approx(1, abs=1e-5)


def test_equal_advantages_of_tokens_are_no_reason_to_divide_by_zero():
    result = gae(of_tokens([[2.0, 2.0], [2.0]]), UNUSED)
    assert whitened([[2.0, 2.0], [2.0]], result) == [[0.0, 0.0], [0.0]]


def test_gae_names_the_first_sample_that_trains_on_what_is_no_number():
    batch = replace(of_tokens([[1.0], [math.nan], [math.inf]], [1, 0, 1]), group_ids=["a", "b", "c"])
    with pytest.raises(ValueError, match="advantages of sample 2 of group c are not finite"):
        gae(batch, UNUSED)


def test_gae_without_a_critic_says_what_it_lacks():
    with pytest.raises(ValueError, match=r"a critic's workers compute \(group value\)"):
        gae(inputs([1.0, 2.0]), UNUSED)
