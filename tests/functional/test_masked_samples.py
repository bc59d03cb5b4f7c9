"""Whole runs in which many samples are masked: for their length, since trainer and engine disagree, or by a
filter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional.runs import CONFIG, SCORED, run_grpo

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run, pytest.mark.slow]

PPO = "configs/ppo_arithmetic_cpu.yaml"
SMALL = [
    *("grpo.max_num_steps=2", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4"),
    *("policy.train_global_batch_size=32", "policy.scheduler.decay_style=constant", "grpo.val_period=0"),
    *("grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.export_final_hf=false"),
    *("rollout.dump_period=1", "generation.num_engines=1", "logger.wandb.mode=disabled", SCORED),
]
# At such a temperature some answers are longer than the limit.
LONG = ["grpo.overlong_filtering=true", "generation.temperature=2"]
FILTERED = ["grpo.sample_filters=[not_truncated]", "generation.temperature=2"]
# In float32 rounding alone makes some samples differ by more.
DISAGREEING = ["grpo.seq_logprob_error_threshold=1.0000003"]


@pytest.mark.parametrize(
    ("config", "options", "outcome"),
    [
        (CONFIG, LONG, "overlong"),
        (CONFIG, [*LONG, "grpo.use_dynamic_sampling=true"], "overlong"),
        (CONFIG, DISAGREEING, "logprob_mismatch"),
        (PPO, DISAGREEING, "logprob_mismatch"),
        (CONFIG, FILTERED, "filtered"),
    ],
    ids=["long", "long, dynamic sampling", "disagreeing", "disagreeing, with a critic", "filtered"],
)
def test_a_step_goes_on_without_its_masked_samples(
    config: str, options: list[str], outcome: str, arithmetic_model: str, tmp_path: Path
) -> None:
    run = run_grpo(tmp_path, [*SMALL, *options], config=config)
    assert run.returncode == 0, run.output
    lines = [
        json.loads(line)
        for file in sorted((run.run_dir / "rollouts").glob("step_*.jsonl"))
        for line in file.read_text(encoding="utf-8").split("\n")[:-1]
    ]
    masked = [line for line in lines if line["outcome"] == outcome]
    assert masked and len(masked) < len(lines)
    for line in masked:
        assert (line["sample_mask"], line["advantage"]) == (0, 0)
        assert line["is_judged"]
        assert all(value in (0, None) for value in line["tokens"].get("advantages", ()))
    for record in run.records():
        rewards = [line["reward"] for line in lines if line["step"] == record["step"]]
        assert record["train/reward"] == pytest.approx(sum(rewards) / len(rewards))
