"""Advantages of tokens in training: from tags, a KL in the reward, or a critic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.algorithms.options import KLType, LossConfig
from nemo_like.batch.columns import MESSAGE_FLAGS, TOKEN_ADVANTAGES
from nemo_like.batch.meta import MicroBatch, MicroBatchLayout, Schedule
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.token_advantages import TokenAdvantages
from tests.unit.algorithms.loss_cases import CONFIG

KL = replace(
    CONFIG, use_kl_in_reward=True, reference_policy_kl_penalty=0.1, reference_policy_kl_type=KLType.k1
)
NAN = np.nan


def batch(own: list[float] | None = None) -> PolicyBatch:
    """Two samples of a prompt token and 2 and 1 response tokens; the second does not train."""
    columns: dict[str, Any] = {
        "input_ids": np.array([5, 6, 7, 5, 9], np.int32),
        "response_mask": np.array([0, 1, 1, 0, 1], np.uint8),
        "prev_logprobs": np.array([0, -1, -1, 0, NAN], np.float32),
        "reference_logprobs": np.array([0, -1.5, -3, 0, -1], np.float32),
    }
    tags = {
        "advantage": [2.0, 0.25],
        "sample_mask": [1.0, 0.0],
        "kl_scale": [0.5, 0.5],
        "token_scale": [3.0, 3.0],
    }
    made = PolicyBatch(columns, [3, 2], tags, torch.device("cpu"))
    if own is not None:
        made.add({TOKEN_ADVANTAGES: np.array(own, np.float32)})
    return made


PADDED = Schedule(()), MicroBatch((1, 0), 2)
PACKED = Schedule((), MicroBatchLayout.packed), MicroBatch((1, 0), 3)
SHARED = Schedule((), MicroBatchLayout.packed), MicroBatch((1, 0), 3, (0, 1))


@pytest.mark.parametrize(("schedule", "spec"), [PADDED, PACKED, SHARED])
@pytest.mark.parametrize(
    ("loss", "own", "expected"),
    [
        (CONFIG, None, [0.25, 2.0, 2.0]),
        # KL to go of the first sample's tokens: 2.5 and 2.
        (KL, None, [0.25, 2 - 0.5 * 2.5, 2 - 0.5 * 2]),
        (CONFIG, [NAN, 0.5, -1.0, NAN, NAN], [0.25, 2 + 3 * 0.5, 2 - 3]),
        # A critic's advantages have the KL already.
        (KL, [NAN, 0.5, -1.0, NAN, NAN], [0.25, 2 + 3 * 0.5, 2 - 3]),
    ],
)
def test_every_token_gets_its_own_advantage_and_masked_ones_that_of_their_tag(
    schedule: Schedule, spec: MicroBatch, loss: LossConfig, own: list[float] | None, expected: list[float]
) -> None:
    made = batch(own)
    inputs = made.micro_batch(spec, schedule)
    found = TokenAdvantages(made, loss).at(inputs, torch.tensor([0.0, 1.0, 1.0]))
    assert found.dtype == torch.float32
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(("schedule", "spec"), [PADDED, PACKED, SHARED])
@pytest.mark.parametrize(("loss", "own"), [(CONFIG, None), (KL, None), (CONFIG, [NAN, 0.5, -1.0, NAN, NAN])])
def test_tokens_of_a_response_of_a_wrong_form_get_its_penalty_instead(
    schedule: Schedule, spec: MicroBatch, loss: LossConfig, own: list[float] | None
) -> None:
    made = batch(own)
    made.add({MESSAGE_FLAGS: np.array([0, 0, 2, 0, 2], np.uint8)})
    inputs, mask = made.micro_batch(spec, schedule), torch.tensor([0.0, 1.0, 1.0])
    before = TokenAdvantages(made, loss).at(inputs, mask).tolist()
    found = TokenAdvantages(made, replace(loss, malformed_thinking_advantage=-4.0)).at(inputs, mask)
    assert found.tolist() == [-4.0, before[1], -4.0]
