"""What a critic's worker makes of values: rewards of tokens, ends of samples, and the columns it reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.algorithms.options import KLType, LossConfig
from nemo_like.batch.columns import (
    INPUT_IDS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_MASK,
    RETURNS,
    TOKEN_ADVANTAGES,
    VALUES,
)
from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.configuration import load_config
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.policy.backends.interface import WorkerConnections
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.workers.value_worker import ValueWorker
from tests.unit.algorithms.loss_cases import CONFIG

VALUE = load_config(Path(__file__).resolve().parents[3] / "configs/ppo_arithmetic_cpu.yaml").value
assert VALUE is not None
KL = replace(
    CONFIG, use_kl_in_reward=True, reference_policy_kl_penalty=0.1, reference_policy_kl_type=KLType.k1
)


def worker(loss: LossConfig = CONFIG, **changes: Any) -> ValueWorker:
    return ValueWorker(
        cfg=replace(VALUE, **changes),
        loss=loss,
        connections=WorkerConnections(
            ParallelLayout(tp=1, cp=1, dp=1, pp=1).coordinates(0), InMemoryDataPlane(), ("127.0.0.1", 0), 1.0
        ),
    )


ENDS = torch.tensor([7.0, 7.0, 4.0, 7.0])


def batch() -> PolicyBatch:
    """With R for a response token: .RR, then ..., then .R.R. of two turns, then .R, which does not train."""
    columns = {
        "input_ids": np.arange(13, dtype=np.int32),
        "response_mask": np.array([0, 1, 1, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1], np.uint8),
        "prev_logprobs": np.array([0, -1, -1, 0, 0, 0, 0, -2, 0, -1, 0, 0, np.nan], np.float32),
        "reference_logprobs": np.array([0, -2, -1, 0, 0, 0, 0, -1, 0, -4, 0, 0, -1], np.float32),
    }
    tags = {
        "shaped_reward": [1.0, 5.0, -2.0, np.nan],
        "is_truncated": [0.0, 0.0, 1.0, 0.0],
        "sample_mask": [1.0, 1.0, 1.0, 0.0],
    }
    return PolicyBatch(columns, [3, 3, 5, 2], tags, torch.device("cpu"))


def test_the_reward_of_a_sample_is_at_its_last_response_token() -> None:
    rewards = worker()._rewards(batch())
    assert rewards.dtype == torch.float64
    assert rewards[:12].tolist() == [0, 0, 1, 0, 0, 0, 0, 0, 0, -2, 0, 0]
    assert rewards[12].isnan()


def test_a_kl_in_the_reward_is_lost_at_every_response_token() -> None:
    # k1, prev - reference: 1 and 0 in the first sample, -1 and 3 in the third.
    rewards = worker(KL)._rewards(batch())
    expected = [0, -0.1, 1, 0, 0, 0, 0, 0.1, 0, -2 - 0.3, 0, 0]
    assert rewards[:12].tolist() == pytest.approx(expected)
    assert rewards[12].isnan()


def test_every_run_of_a_session_ends_with_the_reward_and_is_estimated_by_itself() -> None:
    """Tokens .RR, then R after the first again, then another tree .R; the session was cut off."""
    columns = {
        "input_ids": np.arange(6, dtype=np.int32),
        "response_mask": np.array([0, 1, 1, 1, 0, 1], np.uint8),
        "parent_gaps": np.array([0, 0, 0, 2, 4, 0], np.int32),
    }
    tags = {"shaped_reward": [2.0], "is_truncated": [1.0], "sample_mask": [1.0]}
    session = PolicyBatch(columns, [6], tags, torch.device("cpu"))
    assert worker()._rewards(session).tolist() == [0, 0, 2, 2, 0, 2]
    values, ends = torch.tensor([0, 1.0, 3.0, 1.0, 0, 5.0]), torch.tensor([10.0, 20.0, 30.0])
    of = worker(gae_gamma=1.0, gae_lambda=0.0, bootstrap_truncated=True)
    columns_of = of._advantages_and_returns(session, values, ends)
    expected = [0, 3 - 1, 2 + 10 - 3, 2 + 20 - 1, 0, 2 + 30 - 5]
    assert columns_of[TOKEN_ADVANTAGES].tolist() == expected


@pytest.mark.parametrize("bootstraps", [True, False])
def test_only_a_sample_that_was_cut_off_goes_on_with_the_value_of_its_end(bootstraps: bool) -> None:
    # lambda 0: an advantage is the reward and the next value, less the own value.
    cfg = {"gae_gamma": 1.0, "gae_lambda": 0.0, "bootstrap_truncated": bootstraps}
    values = torch.tensor([0, 0.5, 0.25, 0, 0, 0, 0, 1.0, 0, 3.0, 0, 0, 0.0])
    columns = worker(**cfg)._advantages_and_returns(batch(), values, ENDS)
    assert columns[VALUES] is values
    end = 4.0 if bootstraps else 0.0
    expected = [0, 0.25 - 0.5, 1 - 0.25, 0, 0, 0, 0, 3 - 1, 0, -2 + end - 3, 0, 0]
    assert columns[TOKEN_ADVANTAGES][:12].tolist() == pytest.approx(expected)
    returns = [0, 0.25, 1, 0, 0, 0, 0, 3, 0, -2 + end, 0, 0]
    assert columns[RETURNS][:12].tolist() == pytest.approx(returns)


@pytest.mark.parametrize(
    ("of_policy", "lambdas"),
    [({"gae_lambda_policy": 0.0}, (0.0, 0.0)), ({"gae_length_adaptive_alpha": 1.0}, (0.5, 0.5))],
)
def test_the_policys_advantages_may_have_a_lambda_of_their_own(
    of_policy: dict[str, float], lambdas: tuple[float, float]
) -> None:
    # Both samples with a response have two tokens: 1 - 1 / (1 x 2) = 0.5. With lambda 1 a return is the
    # reward.
    values = torch.tensor([0, 0.5, 0.25, 0, 0, 0, 0, 1.0, 0, 3.0, 0, 0, 0.0])
    columns = worker(gae_gamma=1.0, gae_lambda=1.0, **of_policy)._advantages_and_returns(
        batch(), values, ENDS
    )
    assert columns[RETURNS][:12].tolist() == pytest.approx([0, 1, 1, 0, 0, 0, 0, -2, 0, -2, 0, 0])
    first = [0.25 - 0.5 + lambdas[0] * 0.75, 0.75]
    third = [3 - 1 + lambdas[1] * -5, -5]
    expected = [0, *first, 0, 0, 0, 0, third[0], 0, third[1], 0, 0]
    assert columns[TOKEN_ADVANTAGES][:12].tolist() == pytest.approx(expected)


def test_it_reads_log_probs_only_for_a_kl_in_the_reward_and_trains_on_its_own_columns() -> None:
    (declared,) = worker().declarations()
    assert set(declared.reads) == {INPUT_IDS, RESPONSE_MASK}
    assert set(declared.writes) == {VALUES, RETURNS, TOKEN_ADVANTAGES}
    (declared,) = worker(KL).declarations()
    assert set(declared.reads) == {INPUT_IDS, RESPONSE_MASK, PREV_LOGPROBS, REFERENCE_LOGPROBS}
    assert set(worker(KL).training_reads()) == {INPUT_IDS, RESPONSE_MASK, VALUES, RETURNS}
