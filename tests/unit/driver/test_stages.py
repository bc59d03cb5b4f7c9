from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.algorithms.advantage_estimators.gae import gae
from nemo_like.algorithms.estimators import AdvantageInputs, Advantages
from nemo_like.algorithms.options import GRPOConfig, LossConfig
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.batch.tags import (
    ADVANTAGE,
    IS_IDLE,
    IS_JUDGED,
    KL_SCALE,
    LIKELIHOOD_WEIGHT,
    MULT_PROB_ERROR,
    NUM_RESPONSE_TOKENS,
    OUTCOME,
    REWARD,
    SAMPLE_MASK,
    SCALED_REWARD,
    SHAPED_REWARD,
    TOKEN_SCALE,
)
from nemo_like.configuration import load_config
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.stages import (
    compared_rewards,
    kl_in_reward,
    mean_advantages,
    token_sums,
    validates_after,
    with_advantages,
    with_idle,
    with_likelihood_weights,
    with_shaped_rewards,
    without_mismatch,
    without_truncated,
)
from nemo_like.policy.batch.policy_columns import scored_columns
from tests.unit.algorithms.loss_cases import CONFIG

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def cfg() -> GRPOConfig:
    return load_config(REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml").grpo


def rollout(**tags: object) -> KVBatchMeta:
    """Four samples: the third has no reward, the last two are truncated."""
    return KVBatchMeta(
        partition="train-1",
        chunks=(Chunk("a", (8, 8, 8, 8)),),
        rows=tuple((0, row) for row in range(4)),
        columns=frozenset(),
        tags={
            "reward": (1.0, 0.0, 0.0, 1.0),
            "is_judged": (True, True, False, True),
            "group_id": (0, 0, 0, 0),
            "num_response_tokens": (2, 3, 4, 4),
            "is_truncated": (False, False, True, True),
            **tags,
        },
    )


def test_rewards_are_scaled_then_shaped_and_all_three_stay_in_the_ledger(cfg: GRPOConfig) -> None:
    scaling = replace(cfg.reward_scaling, enabled=True, target_max=10.0)
    shaping = replace(
        cfg.reward_shaping,
        enabled=True,
        max_response_length=4,
        overlong_buffer_length=2,
        overlong_buffer_penalty=1.0,
    )
    batch = with_shaped_rewards(rollout(), replace(cfg, reward_scaling=scaling, reward_shaping=shaping))
    assert batch.tag(REWARD) == (1.0, 0.0, 0.0, 1.0)
    assert batch.tag(SCALED_REWARD) == (10.0, 0.0, 0.0, 10.0)
    assert batch.tag(SHAPED_REWARD) == (10.0, -0.5, -1.0, 9.0)
    assert batch.tag(OUTCOME) == ("trained", "trained", "reward_failed", "trained")


def test_the_overlong_penalty_is_by_what_each_sample_could_have_had_over_all_its_turns(
    cfg: GRPOConfig,
) -> None:
    shaping = replace(cfg.reward_shaping, enabled=True, overlong_buffer_length=2)
    cfg = replace(cfg, reward_shaping=shaping)
    batch = with_shaped_rewards(rollout(max_response_tokens=(4, 4, 4, 16)), cfg)
    # The last sample has four tokens in several turns of four, and is far from its limit.
    assert batch.tag(SHAPED_REWARD) == (1.0, -0.5, -1.0, 1.0)
    with pytest.raises(RunFailed, match=r"max_response_length=null .* does not have as the tag"):
        with_shaped_rewards(rollout(), cfg)


def test_each_filter_names_what_it_masked_and_leaves_earlier_reasons(cfg: GRPOConfig) -> None:
    batch = without_truncated(with_shaped_rewards(rollout(), cfg))
    assert batch.tag(SAMPLE_MASK) == (1, 1, 0, 0)
    assert batch.tag(OUTCOME) == ("trained", "trained", "reward_failed", "overlong")
    batch = without_mismatch(batch.with_tag(MULT_PROB_ERROR, [1.0, 1.9, 9.0, 9.0]), 1.5)
    assert batch.tag(SAMPLE_MASK) == (1, 0, 0, 0)
    assert batch.tag(OUTCOME) == ("trained", "logprob_mismatch", "reward_failed", "overlong")
    assert batch.tag(IS_JUDGED) == (True, True, False, True)


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({}, ("prev_logprobs",)),
        ({"reference_policy_kl_penalty": 0.1}, ("prev_logprobs", "reference_logprobs")),
        ({"force_on_policy_ratio": True}, ()),
        ({"use_generation_logprobs_as_prev": True}, ()),
        ({"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.1}, ("reference_logprobs",)),
    ],
)
def test_what_is_scored_is_what_the_loss_compares_with(
    changes: dict[str, Any], columns: tuple[str, ...]
) -> None:
    assert tuple(column.name for column in scored_columns(replace(CONFIG, **changes))) == columns


def test_truncated_everywhere_masks_everything(cfg: GRPOConfig) -> None:
    batch = without_truncated(with_shaped_rewards(rollout(is_truncated=(True,) * 4), cfg))
    assert not any(batch.tag(SAMPLE_MASK))


def test_an_estimator_sees_shaped_rewards_groups_mask_lengths_and_components(cfg: GRPOConfig) -> None:
    seen: list[AdvantageInputs] = []

    def estimate(inputs: AdvantageInputs) -> Advantages:
        seen.append(inputs)
        return Advantages([0.0] * 4)

    batch = with_shaped_rewards(rollout(**{"reward/correct": (1.0, 0.0, 0.0, 1.0)}), cfg)
    with_advantages(batch.with_tag(SHAPED_REWARD, [5.0, 6.0, 7.0, 8.0]), estimate, ["correct"])
    assert seen == [
        AdvantageInputs(
            rewards=(5.0, 6.0, 7.0, 8.0),
            group_ids=(0, 0, 0, 0),
            sample_mask=(1, 1, 0, 1),
            num_response_tokens=(2, 3, 4, 4),
            components={"correct": (1.0, 0.0, 0.0, 1.0)},
        )
    ]


def test_a_kl_in_the_reward_goes_from_what_scoring_found_to_a_scale_for_training(cfg: GRPOConfig) -> None:
    loss = replace(CONFIG, reference_policy_kl_penalty=0.5)
    batch = with_shaped_rewards(
        rollout(kl_to_go_sum=(3.0, 1.0, 0.0, 2.0), kl_to_go_square_sum=(5.0, 1.0, 0.0, 4.0)), cfg
    )
    assert kl_in_reward(batch, loss) is None
    kl = kl_in_reward(batch, replace(loss, use_kl_in_reward=True))
    assert kl is not None
    assert (kl.coefficient, kl.sums, kl.square_sums) == (0.5, (3.0, 1.0, 0.0, 2.0), (5.0, 1.0, 0.0, 4.0))
    scaled = with_advantages(batch, lambda inputs: Advantages([1.0] * 4, kl_scale=0.25), [], kl)
    assert scaled.tag(ADVANTAGE) == (1.0,) * 4
    assert scaled.tag(KL_SCALE) == (0.25,) * 4


def test_a_critics_sums_go_to_the_estimator_and_its_scale_to_training(cfg: GRPOConfig) -> None:
    batch = with_shaped_rewards(rollout(), cfg)
    assert token_sums(batch) is None
    batch = batch.with_tags(
        {
            "token_advantage_sum": [2.0, -3.0, math.nan, 8.0],
            "token_advantage_square_sum": [4.0, 3.0, math.nan, 20.0],
        }
    )
    of_tokens = token_sums(batch)
    assert of_tokens is not None
    assert of_tokens.sums[:2] == (2.0, -3.0)
    assert of_tokens.square_sums[:2] == (4.0, 3.0)
    scaled = with_advantages(batch, lambda inputs: gae(inputs, cfg), [], None, of_tokens)
    # Over the 2, 3 and 4 tokens of the samples that train: mean 7 / 9, mean square 27 / 9.
    std = math.sqrt(3 - (7 / 9) ** 2)
    assert scaled.tag(TOKEN_SCALE) == pytest.approx([1 / std] * 4)
    shift = -7 / 9 / std
    assert scaled.tag(ADVANTAGE) == pytest.approx([shift, shift, 0.0, shift])
    means = mean_advantages(scaled)
    assert [means[0], means[1], means[3]] == pytest.approx(
        [shift + 1.0 / std, shift - 1.0 / std, shift + 2.0 / std]
    )
    silent = scaled.with_tag(NUM_RESPONSE_TOKENS, [0, 3, 4, 4])
    assert mean_advantages(silent)[0] == 0.0


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (CONFIG, (0, 1, 1, 0)),
        (replace(CONFIG, entropy_coef=0.0), (0, 1, 1, 0)),  # reported alone
        (replace(CONFIG, entropy_coef=0.1), (0, 0, 1, 0)),
        (replace(CONFIG, reference_policy_kl_penalty=0.1), (0, 0, 1, 0)),
    ],
)
def test_idle_is_what_is_masked_or_has_no_advantage_where_nothing_else_enters_the_loss(
    loss: LossConfig, expected: tuple[int, ...]
) -> None:
    batch = with_idle(rollout(sample_mask=(1, 1, 0, 1), advantage=(0.5, 0.0, 0.3, -1.0)), loss)
    assert batch.tag(IS_IDLE) == expected


@pytest.mark.parametrize(
    ("period", "at_start", "at_end", "start_at", "expected"),
    [
        (0, False, False, 0, []),
        (0, True, True, 0, [0, 7]),
        (3, False, False, 0, [3, 6]),
        (3, True, True, 0, [0, 3, 6, 7]),
        (7, False, True, 0, [7]),
        (2, True, True, 3, [0, 4, 6, 7]),
        (2, False, True, 4, [4, 6, 7]),
        (2, False, True, 8, [7]),
    ],
)
def test_validation_falls_on_the_period_the_start_and_the_end(
    period, at_start, at_end, start_at, expected
) -> None:
    grpo = SimpleNamespace(
        val_period=period, val_at_start=at_start, val_at_end=at_end, val_start_at=start_at, max_num_steps=7
    )
    assert [step for step in range(8) if validates_after(step, grpo)] == expected


def test_dynamic_sampling_compares_the_part_of_the_reward_that_is_asked_for(cfg: GRPOConfig) -> None:
    batch = rollout(**{"reward/format": [1.0, 0.0, 1.0, 1.0]})
    by_part = replace(cfg, dynamic_sampling_component="format")
    assert [*compared_rewards(batch, by_part)] == [1.0, 0.0, 1.0, 1.0]
    assert compared_rewards(batch, cfg) == batch.tag(REWARD)
    with pytest.raises(RunFailed, match=r"dynamic_sampling_component=form is no part .* there are format"):
        compared_rewards(batch, replace(cfg, dynamic_sampling_component="form"))


def test_the_tokens_of_an_updates_right_answers_share_the_likelihoods_weight() -> None:
    # Two updates of two samples. In the first one answer of 4 tokens is right; in the second both have the
    # reward, and one of them, of 5 tokens, does not train.
    batch = rollout(
        reward=[1.0, 0.5, 1.0, 2.0], sample_mask=[1.0, 1.0, 1.0, 0.0], num_response_tokens=[4, 3, 2, 5]
    )
    loss = replace(CONFIG, positive_example_nll_weight=0.2)
    given = with_likelihood_weights(batch, loss, solved_reward=1.0, update_size=2)
    assert given.tag(LIKELIHOOD_WEIGHT) == (0.05, 0.0, 0.1, 0.0)


def test_without_a_likelihood_term_no_sample_has_a_weight() -> None:
    batch = with_likelihood_weights(rollout(), CONFIG, solved_reward=1.0, update_size=2)
    assert not batch.has_tag(LIKELIHOOD_WEIGHT)
