from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.mismatch import logprob_mismatch


def batch_of(
    generation: list[float], response_mask: list[int], lengths: list[int], sample_mask: list[float]
) -> PolicyBatch:
    columns = {
        "input_ids": np.zeros(len(generation), np.int32),
        "response_mask": np.array(response_mask, np.uint8),
        "generation_logprobs": np.array(generation, np.float32),
    }
    return PolicyBatch(columns, lengths, {"sample_mask": sample_mask}, torch.device("cpu"))


def test_equal_logprobs_give_an_error_of_one_and_no_divergence() -> None:
    batch = batch_of([0, -1, -2], [0, 1, 1], [3], [1.0])
    found = logprob_mismatch(batch, torch.tensor([0.0, -1.0, -2.0]))
    values = {name: metric.value for name, metric in found.metrics.items()}
    assert found.mult_prob_error == pytest.approx([1.0])
    assert values == pytest.approx(
        {
            "token_mult_prob_error": 1.0,
            "gen_kl_error": 0.0,
            "policy_kl_error": 0.0,
            "js_divergence_error": 0.0,
            "sampling_importance_ratio": 1.0,
            "approx_entropy": 1.5,
        },
        abs=1e-6,
    )


def test_one_token_twice_as_likely_for_the_trainer() -> None:
    # generation p = 1/4, trainer p = 1/2: a ratio of 2; the mixture has 3/8, 3/2 times generation's.
    batch = batch_of([0.0, math.log(1 / 4)], [0, 1], [2], [1.0])
    found = logprob_mismatch(batch, torch.tensor([0.0, math.log(1 / 2)]))
    values = {name: metric.value for name, metric in found.metrics.items()}
    assert values == pytest.approx(
        {
            "token_mult_prob_error": 2.0,
            "gen_kl_error": 2 - 1 - math.log(2),
            "policy_kl_error": 2 * math.log(2) - (2 - 1),
            "js_divergence_error": (2 * math.log(4 / 3) + math.log(2 / 3)) / 2,
            "sampling_importance_ratio": 2.0,
            "approx_entropy": 2 * math.log(2),
        },
        abs=1e-6,
    )


def test_the_error_of_a_sample_is_the_mean_over_its_response_tokens_in_either_direction() -> None:
    batch = batch_of([9, -1, -1, -5, 9, -1], [0, 1, 1, 0, 0, 1], [4, 2], [1.0, 1.0])
    gap = math.log(2)
    prev = torch.tensor([0.0, -1 + gap, -1 - 2 * gap, 0.0, 0.0, -1.0])
    # Sample 0: (2 + 4) / 2, the prompt and the tool token left out; sample 1: exactly equal.
    assert logprob_mismatch(batch, prev).mult_prob_error == pytest.approx([3.0, 1.0])


def test_samples_that_do_not_train_count_in_their_own_tag_but_not_in_the_metrics() -> None:
    batch = batch_of([0, -1, 0, -1, -1], [0, 1, 0, 1, 1], [2, 3], [0.0, 1.0])
    found = logprob_mismatch(batch, torch.tensor([0.0, -1 + math.log(3), 0.0, -1.0, -1.0]))
    assert found.mult_prob_error == pytest.approx([3.0, 1.0])
    assert found.metrics["token_mult_prob_error"].value == pytest.approx(1.0)
    assert found.metrics["token_mult_prob_error"].weight == 2


def test_a_sample_without_response_tokens_agrees() -> None:
    batch = batch_of([0, 0], [0, 0], [2], [1.0])
    found = logprob_mismatch(batch, torch.zeros(2))
    assert found.mult_prob_error == [1.0]
    assert found.metrics["gen_kl_error"].value == 0.0
