"""Arguments of vLLM's and Megatron-core's own, in a whole run."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tests.functional.runs import FEWEST_PROCESSES, run_grpo

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run, pytest.mark.slow]

NUM_BLOCKS, BLOCK_TOKENS = 200, 32
STEPS = ["grpo.max_num_steps=3", "grpo.val_at_start=false", "grpo.val_at_end=false", *FEWEST_PROCESSES]
PASSED = [
    f"generation.vllm_kwargs={{num_gpu_blocks_override: {NUM_BLOCKS}}}",
    "policy.megatron_cfg.model_kwargs={recompute_granularity: selective, recompute_modules: [core_attn]}",
    *("logger.profile.steps=[2]", "logger.profile.processes=[policy_worker]"),
]


def test_arguments_that_are_passed_on_act_and_leave_the_results_as_they_are(
    arithmetic_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    plain, passed = (
        run_grpo(tmp_path / name, [*STEPS, *more]) for name, more in (("plain", []), ("passed", PASSED))
    )
    assert (plain.returncode, passed.returncode) == (0, 0), passed.output
    log = (passed.run_dir / "logs" / "engine.log").read_text(encoding="utf-8")
    assert f"KV cache size: {NUM_BLOCKS * BLOCK_TOKENS:,} tokens" in log
    with gzip.open(passed.run_dir / "profiles" / "step_2" / "policy_worker.json.gz", "rt") as trace:
        assert "CheckpointFunctionBackward" in trace.read()
    losses = plain.metrics("train/loss")
    assert len(losses) == 3
    assert passed.metrics("train/loss") == pytest.approx(losses, abs=1e-6)
