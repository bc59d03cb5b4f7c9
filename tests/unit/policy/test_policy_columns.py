"""What the policy's phases read and write."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nemo_like.batch.columns import PREV_LOGPROBS, REFERENCE_LOGPROBS, Column
from nemo_like.policy.policy_columns import scoring_reads
from tests.unit.algorithms.loss_cases import CONFIG


@pytest.mark.parametrize(
    ("columns", "use_kl_in_reward", "compared"),
    [
        ([PREV_LOGPROBS], False, {"generation_logprobs"}),
        ([PREV_LOGPROBS, REFERENCE_LOGPROBS], True, {"generation_logprobs"}),
        ([REFERENCE_LOGPROBS], False, set()),
        ([REFERENCE_LOGPROBS], True, {"prev_logprobs"}),
    ],
)
def test_a_log_prob_phase_fetches_what_it_compares_with_and_does_not_compute_itself(
    columns: Sequence[Column], use_kl_in_reward: bool, compared: set[str]
) -> None:
    reads = scoring_reads(columns, replace(CONFIG, use_kl_in_reward=use_kl_in_reward))
    assert {column.name for column in reads} == {"input_ids", "response_mask"} | compared
