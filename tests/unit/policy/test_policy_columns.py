"""What the policy's phases read and write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from nemo_like.batch.columns import ENTROPIES, PREV_LOGPROBS, REFERENCE_LOGPROBS, Column
from nemo_like.configuration import Config
from nemo_like.policy.batch.policy_columns import (
    dumped_columns,
    policy_declarations,
    scored_in_step,
    scoring_reads,
)
from tests.unit.algorithms.loss_cases import CONFIG


@pytest.mark.parametrize(
    ("columns", "use_kl_in_reward", "compared"),
    [
        ([PREV_LOGPROBS], False, {"generation_logprobs"}),
        ([PREV_LOGPROBS, REFERENCE_LOGPROBS], True, {"generation_logprobs"}),
        ([PREV_LOGPROBS, ENTROPIES], False, {"generation_logprobs"}),
        ([REFERENCE_LOGPROBS], False, set()),
        ([REFERENCE_LOGPROBS], True, {"prev_logprobs"}),
    ],
)
def test_a_log_prob_phase_fetches_what_it_compares_with_and_does_not_compute_itself(
    columns: Sequence[Column], use_kl_in_reward: bool, compared: set[str]
) -> None:
    reads = scoring_reads(columns, replace(CONFIG, use_kl_in_reward=use_kl_in_reward))
    assert {column.name for column in reads} == {"input_ids", "response_mask"} | compared


@pytest.mark.parametrize(
    ("dump_period", "changes", "with_entropies"),
    [
        (0, {}, []),
        (2, {}, [2, 4]),
        (1, {}, [1, 2, 3, 4]),
        # Nothing scores the tokens under the current weights then.
        (1, {"use_generation_logprobs_as_prev": True}, []),
        (1, {"force_on_policy_ratio": True, "reference_policy_kl_penalty": 0.1}, []),
    ],
)
def test_entropies_are_computed_in_scored_steps_whose_rollouts_are_dumped(
    demo: Callable[..., Config], dump_period: int, changes: dict[str, float], with_entropies: list[int]
) -> None:
    loss, rollout = replace(CONFIG, **changes), replace(demo().rollout, dump_period=dump_period)
    scored = {step: scored_in_step(step, loss, rollout) for step in (1, 2, 3, 4)}
    assert [step for step, columns in scored.items() if ENTROPIES in columns] == with_entropies
    rollout = replace(rollout, excerpt_period=1)  # no excerpt is worth a pass over the whole step
    assert {step: scored_in_step(step, loss, rollout) for step in (1, 2, 3, 4)} == scored
    declared, _ = policy_declarations(loss, dumped=dumped_columns(loss, rollout))
    assert (ENTROPIES in declared.writes) is bool(with_entropies)
