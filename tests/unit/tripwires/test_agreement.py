from __future__ import annotations

import math
from pathlib import Path

import pytest

from nemo_like.configuration import load_config
from nemo_like.tripwires.agreement import agreement_alarms, mismatch_limit, routing_alarms
from nemo_like.tripwires.alarm import Alarm

ROOT = Path(__file__).resolve().parents[3]


def alarms(error: float | None, *overrides: str, has_experts: bool = False) -> list[Alarm]:
    """What the demo, float32 on the CPU, says of an error."""
    cfg = load_config(ROOT / "configs/grpo_arithmetic_cpu.yaml", overrides)
    return list(agreement_alarms(error, cfg, has_experts=has_experts))


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ((), 1.00002),
        (("policy.precision=bfloat16",), 1.05),
        (("policy.device=cuda",), 1.05),
        (("policy.device=cuda", "policy.precision=bfloat16"), 1.05),
        (("rollout.replay=runs/earlier/recorded",), 1.05),
    ],
)
def test_the_limit_is_that_of_device_and_precision(overrides: tuple[str, ...], limit: float) -> None:
    cfg = load_config(ROOT / "configs/grpo_arithmetic_cpu.yaml", overrides)
    assert mismatch_limit(cfg) == limit


@pytest.mark.parametrize("error", [1.0000005, 1.0000017, 1.00002, None])
def test_rounding_is_no_alarm_and_neither_is_what_was_not_measured(error: float | None) -> None:
    assert alarms(error) == []


@pytest.mark.parametrize("error", [1.00003, 1.5, math.inf, math.nan])
def test_in_float32_on_the_cpu_a_larger_error_ends_the_run(error: float) -> None:
    (alarm,) = alarms(error)
    assert alarm.ends_run
    assert f"token_mult_prob_error is {error:.7g}, over 1.00002 (float32 on cpu)" in alarm.wrong
    assert "docs/explanation/disagreement.md" in alarm.look_at


def test_elsewhere_it_is_a_warning_above_a_coarser_limit() -> None:
    assert alarms(1.049, "policy.precision=bfloat16") == []
    (alarm,) = alarms(1.051, "policy.precision=bfloat16")
    assert not alarm.ends_run
    assert "1.051, over 1.05 (bfloat16 on cpu)" in alarm.wrong


def test_a_mixture_of_experts_is_only_warned_of() -> None:
    assert [alarm.ends_run for alarm in alarms(1.01, has_experts=True)] == [False]


def test_where_routers_replay_rounding_sends_no_token_elsewhere() -> None:
    (alarm,) = alarms(1.01, "policy.megatron_cfg.router_replay=true", has_experts=True)
    assert alarm.ends_run


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [((), 0.001), (("policy.precision=bfloat16",), 0.5), (("rollout.replay=runs/earlier/recorded",), 0.5)],
)
def test_other_choices_of_experts_are_a_warning_above_a_limit(
    overrides: tuple[str, ...], limit: float
) -> None:
    cfg = load_config(ROOT / "configs/grpo_arithmetic_cpu.yaml", overrides)
    assert list(routing_alarms(None, cfg)) == list(routing_alarms(limit, cfg)) == []
    (alarm,) = routing_alarms(1.1 * limit, cfg)
    assert not alarm.ends_run
    assert f"routing_disagreement is {1.1 * limit:.3g}, over {limit:g}" in alarm.wrong
    assert len(list(routing_alarms(math.nan, cfg))) == 1


def test_a_limit_of_ones_own_says_what_ends_the_run() -> None:
    own = "grpo.max_token_mult_prob_error=1.01"
    assert [alarm.ends_run for alarm in alarms(1.005, own)] == [False]
    (alarm,) = alarms(1.02, own)
    assert alarm.ends_run
    assert "over grpo.max_token_mult_prob_error=1.01" in alarm.wrong


def test_without_tripwires_only_a_limit_of_ones_own_counts() -> None:
    assert alarms(1.5, "debug.tripwires=off") == []
    (alarm,) = alarms(1.5, "debug.tripwires=off", "grpo.max_token_mult_prob_error=1.2")
    assert alarm.ends_run
