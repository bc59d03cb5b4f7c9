"""Long samples take memory in proportion to their length."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.runs import ROOT, SCORED, run_grpo

# One matrix of a number for each pair of 8,192 tokens would double what a further token takes at the end.
MOST_GROWTH = {"logprobs": 1.4, "train": 1.1}


@pytest.mark.slow
def test_a_further_token_takes_no_more_memory_in_a_longer_sample() -> None:
    command = [sys.executable, "scripts/bench/long_samples.py", "--lengths", "2048,4096,8192"]
    command += ["--vocabularies", "64", "--kinds", "megatron,fsdp"]
    run = subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    (kinds,) = json.loads(run.stdout).values()
    assert set(kinds) == {"megatron", "fsdp"}
    for kind, phases in kinds.items():
        for phase, found in phases.items():
            assert found["growth"] < MOST_GROWTH[phase], (kind, phase, found)


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_a_run_samples_and_trains_on_prompts_of_16k_tokens(
    backend: str, arithmetic_model: str, tmp_path: Path
) -> None:
    longest = 16_384
    model, problems = tmp_path / "model", tmp_path / "problems.jsonl"
    shutil.copytree(ROOT / arithmetic_model, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": longest}))
    digits = random.Random(1)
    records = [
        {"prompt": "".join(digits.choices("0123456789", k=longest - 64)), "answer": "0"} for _ in range(2)
    ]
    problems.write_text("".join(json.dumps(record) + "\n" for record in records))
    overrides = [
        *(f"data.{split}={{kind: jsonl, path: {problems}}}" for split in ("train", "validation")),
        "env.arithmetic.kind=function",
        "++env.arithmetic.options={function: 'tests.functional.matrix_rewards:varied', arguments: {}}",
        *(f"policy.model_name={model}", f"policy.backend={backend}"),
        *(f"policy.max_total_sequence_length={longest}", "policy.train_global_batch_size=4"),
        *(f"policy.sequence_packing.{phase}_mb_tokens={longest}" for phase in ("train", "logprob")),
        *("policy.sequence_packing.share_prompts=false", "policy.data_parallel_size=1", SCORED),
        *("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2", "grpo.samples_kept_together=2"),
        *("grpo.max_num_steps=2", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"),
        *(
            "generation.num_engines=1",
            "generation.max_new_tokens=64",
            "generation.vllm_cfg.kv_cache_gib=0.25",
        ),
    ]
    run = run_grpo(tmp_path, overrides)
    assert run.returncode == 0, run.output
    assert min(run.metrics("train/mean_prompt_length")) == longest - 64
    assert max(run.metrics("train/token_mult_prob_error")) < 1.0001
    assert min(run.metrics("train/grad_norm")) > 0
