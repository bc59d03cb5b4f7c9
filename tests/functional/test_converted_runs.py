"""Configurations of other frameworks train as the command converts them: two steps of each, with a tiny model
and tiny problems that overrides alone put in the place of theirs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import pytest
from omegaconf import OmegaConf

from nemo_like.data.arithmetic import addition_answer, addition_prompt
from tests.functional.runs import FEWEST_PROCESSES, ROOT, FinishedRun, run_grpo

pytestmark = [pytest.mark.slow, pytest.mark.whole_run, pytest.mark.timeout(600)]

EXAMPLES = ROOT / "tests" / "unit" / "conversion" / "examples"
NUM_STEPS = 2
# Of messages no more than what they say, since that is what the tiny models were taught to continue.
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
TRAINED = ("train_global_batch_size=16", "train_micro_batch_size=4", "logprob_batch_size=4")
SMALL = [
    *FEWEST_PROCESSES,
    *("policy.device=cpu", "policy.precision=float32", "policy.max_total_sequence_length=32"),
    *(f"policy.{override}" for override in TRAINED),
    *("policy.scheduler.warmup_updates=0", "policy.optimizer.lr=1.0e-4"),
    *(f"grpo.max_num_steps={NUM_STEPS}", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4"),
    *("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0"),
    *("generation.max_new_tokens=5", "generation.vllm_cfg.tensor_parallel_size=1"),
    *("generation.vllm_cfg.kv_cache_gib=0.125", "generation.vllm_cfg.enforce_eager=true"),
    *("cluster.address=null", "cluster.num_nodes=1", "cluster.gpus_per_node=0"),
    *("cluster.gpu_memory_gib=null", "cluster.placement=separate"),
    *("policy.offload_optimizer_for_logprob=false", "policy.offload_parameters_between_phases=false"),
    *("data.max_input_seq_length=16", "data.default.prompt_template=null", "env.math.num_actors=1"),
    *("checkpointing.enabled=false", "checkpointing.export_final_hf=false", "logger.wandb.mode=disabled"),
]
CRITIC = [
    *("value.precision=float32", "value.warmup_steps=0"),
    *("value.offload_optimizer_for_logprob=false", "value.offload_parameters_between_phases=false"),
    *(f"value.{override}" for override in TRAINED),
]


class Example(NamedTuple):
    """A configuration of another framework, how it becomes small, and what a run shows of it."""

    file: str
    keys: dict[str, Any]  # of the run's configuration, that came from the example
    metrics: tuple[str, ...]  # of every step, above 0
    overrides: tuple[str, ...] = ()
    model: str = "arithmetic"


RUNS = [
    Example("verl/grpo_gsm8k_7b.sh", {"loss_fn.reference_policy_kl_penalty": 0.001}, ("kl_penalty",)),
    Example(
        "verl/ppo_critic_7b.sh",
        {"grpo.adv_estimator.name": "gae", "loss_fn.use_kl_in_reward": True, "value.gae_lambda": 0.95},
        ("value/loss", "value/grad_norm"),
        ("grpo.num_generations_per_prompt=1", "grpo.num_prompts_per_step=32"),
    ),
    Example(
        "verl/rloo_two_nodes.yaml",
        {"grpo.adv_estimator.name": "rloo", "loss_fn.truncated_importance_sampling_type": "tis"},
        ("entropy",),
        ("logger.mlflow.enabled=false",),
    ),
    Example(
        "nemo_rl/dapo_7b.yaml",
        {"grpo.use_dynamic_sampling": True, "loss_fn.ratio_clip_c": 10},
        ("dynamic_sampling_num_gen_batches",),
        (
            *("grpo.dynamic_sampling_num_prompts=16", "grpo.reward_shaping.max_response_length=5"),
            "grpo.reward_shaping.overlong_buffer_length=2",
        ),
    ),
    Example(
        "nemo_rl/ppo_critic.yaml",
        {"grpo.adv_estimator.name": "gae", "value.clip_range": 0.2},
        ("value/loss", "value/grad_norm", "kl_penalty"),
    ),
    Example(
        "nemo_rl/moe_megatron_30b.yaml",
        {"policy.backend": "megatron", "grpo.use_leave_one_out_baseline": True},
        ("moe/max_load",),
        (
            *(
                "policy.megatron_cfg.tensor_model_parallel_size=1",
                "policy.megatron_cfg.sequence_parallel=false",
            ),
            "policy.megatron_cfg.expert_model_parallel_size=1",
        ),
        model="mixture",
    ),
    Example(
        "trl/gspo.yaml",
        {"loss_fn.kind": "gspo", "loss_fn.ratio_clip_max": 0.0004},
        ("probs_ratio_clamped",),
    ),
    Example(
        "trl/mixture_dr_grpo.yaml",
        {"grpo.normalize_rewards": False, "loss_fn.sequence_length_normalizer": 1024},
        ("env/all/reward/math",),
    ),
    Example(
        "trl/lora_8b.sh",
        {"policy.lora.rank": 32, "loss_fn.truncated_importance_sampling_type": "seq_mask"},
        ("probs_ratio",),
    ),
]


@pytest.fixture(scope="module")
def models(arithmetic_model: str, mixture_model: str) -> dict[str, str]:
    return {"arithmetic": arithmetic_model, "mixture": mixture_model}


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a Parquet file of sums for each framework, with the columns that its configurations name."""
    directory = tmp_path_factory.mktemp("problems")
    numbers = [(one, other) for one in range(10, 90, 9) for other in range(11, 60, 7)]
    sums = [(addition_prompt(*pair, digits=2), addition_answer(*pair, digits=2)) for pair in numbers]
    rows = {
        "verl": lambda sum, answer: {
            "prompt": [{"role": "user", "content": sum}],
            "reward_model": {"style": "rule", "ground_truth": answer},
        },
        "nemo_rl": lambda sum, answer: {
            "problem": sum,
            "expected_answer": answer,
            "prompt": [{"role": "user", "content": sum}],
            "reward_model": {"ground_truth": answer},
        },
        "trl": lambda sum, answer: {"prompt": sum, "solution": answer},
    }
    for framework, row in rows.items():
        data = datasets.Dataset.from_list([row(*one) for one in sums])
        data.to_parquet(str(directory / f"{framework}.parquet"))
    return {framework: directory / f"{framework}.parquet" for framework in rows}


def converted(example: Example, directory: Path) -> Path:
    output = directory / "mine.yaml"
    command = [sys.executable, "scripts/convert_config.py", str(EXAMPLES / example.file), "-o", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return output


def own_problems(configuration: Path, file: Path) -> Iterator[str]:
    """Yield arguments with which the sources of a configuration are as they are, but read this file."""
    data = OmegaConf.load(configuration).data
    for split in ("train", "validation"):
        given = OmegaConf.to_container(data.get(split, data.train))
        sources = given if isinstance(given, list) else [given]
        named = [{"name": f"source_{number}", **source} for number, source in enumerate(sources)]
        kept = [{**source, "path": str(file), "subset": None} for source in named]
        texts = (", ".join(f"{key}: {json.dumps(value)}" for key, value in one.items()) for one in kept)
        yield f"data.{split}=[{', '.join(f'{{{text}}}' for text in texts)}]"


def check(run: FinishedRun, example: Example) -> None:
    assert run.returncode == 0, run.output
    records = run.records()
    assert [record["step"] for record in records] == [*range(1, NUM_STEPS + 1)]
    for record in records:
        assert math.isfinite(record["train/loss"])
        shown = {name: record.get(f"train/{name}", 0.0) for name in ("grad_norm", *example.metrics)}
        assert all(0 < value < math.inf for value in shown.values()), shown
    cfg = OmegaConf.load(run.run_dir / "config.yaml")
    assert {key: OmegaConf.select(cfg, key) for key in example.keys} == example.keys


@pytest.mark.parametrize("example", RUNS, ids=lambda example: example.file)
def test_an_example_trains_as_it_is_converted(
    example: Example, models: dict[str, str], problems: dict[str, Path], tmp_path: Path
) -> None:
    configuration = converted(example, tmp_path)
    own = [f"policy.model_name={models[example.model]}"]
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    own += [
        f"data.chat_template={template}",
        *own_problems(configuration, problems[example.file.split("/")[0]]),
    ]
    if "value" in OmegaConf.load(configuration):
        own += [f"value.model_name={models[example.model]}", *CRITIC]
    run = run_grpo(tmp_path, [*SMALL, *own, *example.overrides], config=str(configuration))
    check(run, example)
