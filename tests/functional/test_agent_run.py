"""Runs in which an agent, which knows nothing of this project, is trained by the endpoint that it calls."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.prepare_sums import make_data
from tests.functional.runs import FEWEST_PROCESSES, run_grpo
from tests.functional.tool_models import calling_model

pytestmark = [pytest.mark.whole_run, pytest.mark.timeout(900)]

CONFIG = "configs/grpo_agent_cpu.yaml"


def test_two_steps_train_on_the_sessions_of_an_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a proxy for everything else, which nobody can reach."""
    make_data(tmp_path / "sums")
    model = calling_model(tmp_path / "model")
    for name in ("HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    options = [
        *("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "grpo.max_num_steps=2"),
        *("policy.train_global_batch_size=16", "grpo.val_at_start=false", "grpo.val_period=0"),
        *("grpo.max_val_samples=16", *FEWEST_PROCESSES),
        *(f"policy.model_name={model}", f"vars.problems={tmp_path / 'sums'}"),
        "env.sums.options.agent=tests.functional.parity_agent:agent",
    ]
    run = run_grpo(tmp_path, options, config=CONFIG)
    assert run.returncode == 0, run.output
    assert min(run.metrics("train/env/sums/num_calls")) >= 1
    assert run.metrics("train/num_failed_rewards") == [0, 0]
    assert min(run.metrics("train/grad_norm")) > 0
    assert len(run.metrics("validation/accuracy")) == 1
    assert run.temporary_files == []


@pytest.mark.slow
def test_the_demo_with_an_agent_learns(sums_model: str, tmp_path: Path) -> None:
    run = run_grpo(tmp_path, ["logger.wandb.mode=disabled"], config=CONFIG, timeout_s=850)
    assert run.returncode == 0, run.output
    accuracy = run.metrics("validation/accuracy")
    assert accuracy[-1] >= accuracy[0] + 0.3
