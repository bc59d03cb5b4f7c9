from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.configuration import load_config
from nemo_like.policy.options import Precision
from nemo_like.tripwires.canary_checks import canary_alarms, canary_gap, canary_tokens

POLICY = load_config(Path(__file__).resolve().parents[3] / "configs/grpo_arithmetic_cpu.yaml").policy


def test_the_tokens_are_always_the_same_and_many() -> None:
    tokens = canary_tokens(64, 100)
    assert tokens == canary_tokens(64, 100)
    assert len(tokens) == 32
    assert len(set(tokens)) > 16
    assert all(0 <= token < 64 for token in tokens)
    assert canary_tokens(64, 5) == tokens[:5]


def test_the_worst_engine_counts() -> None:
    trainer = [-1.0, -2.0]
    assert canary_gap(trainer, [[-1.0, -2.0], [-1.5, -1.9]]) == pytest.approx(0.3)
    assert canary_gap(trainer, [[-1.0, math.nan], [-1.0, -2.0]]) == math.inf


def test_rounding_is_no_alarm() -> None:
    assert list(canary_alarms(2e-6, POLICY, has_experts=False)) == []
    assert list(canary_alarms(None, POLICY, has_experts=False)) == []


def test_in_float32_on_the_cpu_a_gap_ends_the_run_unless_experts_may_differ() -> None:
    assert [one.ends_run for one in canary_alarms(1e-3, POLICY, has_experts=False)] == [True]
    assert [one.ends_run for one in canary_alarms(1e-3, POLICY, has_experts=True)] == [False]


def test_elsewhere_it_is_a_warning() -> None:
    bfloat16 = replace(POLICY, precision=Precision.bfloat16)
    assert list(canary_alarms(0.1, bfloat16, has_experts=False)) == []
    assert [one.ends_run for one in canary_alarms(0.3, bfloat16, has_experts=False)] == [False]
