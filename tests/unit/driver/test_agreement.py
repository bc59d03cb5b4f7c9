from __future__ import annotations

import math
from pathlib import Path

import pytest

from nemo_like.config.loader import load_config
from nemo_like.driver.agreement import AgreementWatch, mismatch_limit
from nemo_like.driver.run_failures import RunFailed

ROOT = Path(__file__).resolve().parents[3]


def watch(*overrides: str) -> tuple[AgreementWatch, list[str]]:
    """A watch over the demo, float32 on the CPU, and what it warns of."""
    warnings: list[str] = []
    cfg = load_config(ROOT / "configs/grpo_arithmetic_cpu.yaml", overrides)
    return AgreementWatch(cfg, warnings.append), warnings


def errors(*values: float) -> list[tuple[int, dict[str, float]]]:
    return [(step, {"train/token_mult_prob_error": value}) for step, value in enumerate(values, 1)]


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


def test_the_first_step_above_the_limit_is_warned_of_and_no_other() -> None:
    agreement, warnings = watch()
    for step, metrics in errors(1.0000005, 1.0000017, 1.00002, 1.00008, 1.0038):
        agreement.check(step, metrics)
    assert len(warnings) == 1
    assert "token_mult_prob_error is 1.00008 at step 4, over 1.00002 (float32 on cpu)" in warnings[0]
    assert "a weight did not reach the engines; docs/metrics.md" in warnings[0]


def test_elsewhere_rounding_of_a_coarser_precision_is_no_warning() -> None:
    agreement, warnings = watch("policy.precision=bfloat16")
    for step, metrics in errors(1.02, 1.049, 1.051):
        agreement.check(step, metrics)
    assert len(warnings) == 1
    assert "1.051 at step 3, over 1.05 (bfloat16 on cpu)" in warnings[0]


def test_an_error_that_is_no_number_is_above_every_limit() -> None:
    agreement, warnings = watch()
    agreement.check(*errors(math.nan)[0])
    assert len(warnings) == 1


def test_a_step_that_compared_nothing_is_not_looked_at() -> None:
    agreement, warnings = watch("grpo.max_token_mult_prob_error=1.1")
    agreement.check(1, {"train/reward": 1.0})
    assert warnings == []


@pytest.mark.parametrize("error", [1.2, math.nan])
def test_a_step_above_the_maximum_ends_the_run(error: float) -> None:
    agreement, _ = watch("grpo.max_token_mult_prob_error=1.1")
    agreement.check(*errors(1.09)[0])
    with pytest.raises(RunFailed, match=r"at step 1, over grpo\.max_token_mult_prob_error=1\.1: trainer and"):
        agreement.check(*errors(error)[0])
