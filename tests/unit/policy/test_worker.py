"""What the policy worker decides without a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nemo_like.policy.worker import logprob_reads
from tests.unit.algorithms.loss_cases import CONFIG


@pytest.mark.parametrize(
    ("columns", "use_kl_in_reward", "compared"),
    [
        (["prev_logprobs"], False, {"generation_logprobs"}),
        (["prev_logprobs", "reference_logprobs"], True, {"generation_logprobs"}),
        (["reference_logprobs"], False, set()),
        (["reference_logprobs"], True, {"prev_logprobs"}),
    ],
)
def test_a_log_prob_phase_fetches_what_it_compares_with_and_does_not_compute_itself(
    columns: Sequence[str], use_kl_in_reward: bool, compared: set[str]
) -> None:
    reads = logprob_reads(columns, replace(CONFIG, use_kl_in_reward=use_kl_in_reward))
    assert {column.name for column in reads} == {"input_ids", "response_mask"} | compared
