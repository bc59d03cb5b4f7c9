"""``run_grpo.py`` as a user calls it: what cannot run stops in seconds, before anything heavy is loaded."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_like.config.loader import load_config
from tests.unit.config.checkpoints import DEMO, REPOSITORY, write_checkpoint

HEAVY = frozenset(
    {"torch", "ray", "vllm", "megatron", "transformers", "tensordict", "transfer_queue", "numpy"}
)
LIMIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    exit_code: int
    stdout: str
    stderr: str
    imported: frozenset[str]  # top-level packages
    cpu_s: float
    wall_s: float


Command = Callable[..., Outcome]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")

    def run(*arguments: str, config: str = str(DEMO)) -> Outcome:
        there = [f"policy.model_name={checkpoint}", f"logger.log_dir={tmp_path / 'runs'}"]
        line = [sys.executable, "-X", "importtime", "run_grpo.py", "--config", config, *there, *arguments]
        before, started = os.times(), time.monotonic()
        done = subprocess.run(line, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
        after = os.times()
        lines = done.stderr.splitlines()
        modules = [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")]
        return Outcome(
            exit_code=done.returncode,
            stdout=done.stdout,
            stderr="\n".join(line for line in lines if not line.startswith("import time:")),
            imported=frozenset(module.partition(".")[0] for module in modules),
            cpu_s=after.children_user + after.children_system - before.children_user - before.children_system,
            wall_s=time.monotonic() - started,
        )

    return run


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("grpo.num_prompt_per_step=8", "did you mean grpo.num_prompts_per_step?"),
        ("++policy.foo=bar", "policy.foo is not a key of the configuration"),
        ("policy.device=gpu", "policy.device='gpu' must be one of cpu, cuda"),
        ("policy.train_global_batch_size=500", "must divide the N = 128 prompts x 8 generations"),
        ("policy.megatron_cfg.tensor_model_parallel_size=3", "must divide the model's 4 attention heads"),
        ("policy.model_name=/nowhere/model", "policy.model_name=/nowhere/model is not a directory"),
        ("cluster.num_cpus=2", "cluster.num_cpus=2 must be at least 7: TransferQueue controller 1 x 1"),
        ("generation.temperature=0", "generation.temperature=0.0 must be above 0"),
        ("grpo.seed", "write key=value"),
    ],
)
def test_a_nonsense_configuration_stops_in_seconds_with_the_remedy(
    command: Command, argument: str, message: str
) -> None:
    outcome = command(argument)
    assert outcome.exit_code == 2
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert outcome.stdout == ""
    assert not outcome.imported & HEAVY
    # The machine may be busy with other things, but the work itself must be far from the limit.
    assert outcome.cpu_s < LIMIT_S
    assert outcome.wall_s < 4 * LIMIT_S


def test_all_problems_of_a_configuration_are_told_at_once(command: Command) -> None:
    outcome = command("generation.temperature=0", "cluster.num_cpus=2", "generation.top_p=0.5")
    assert outcome.stderr.startswith("3 problems in the configuration:")


def test_a_config_file_that_is_not_there_proposes_the_nearest(command: Command) -> None:
    outcome = command(config="configs/grpo_arithmetic.yaml")
    assert outcome.exit_code == 2
    assert "configs/grpo_arithmetic.yaml is not a file; did you mean configs/grpo_arithmetic_cpu.yaml?" in (
        outcome.stderr
    )


def test_a_dry_run_prints_the_plan_without_loading_anything_heavy(command: Command, tmp_path: Path) -> None:
    outcome = command("--dry-run", "policy.megatron_cfg.tensor_model_parallel_size=2", "grpo.max_num_steps=3")
    assert outcome.exit_code == 0, outcome.stderr
    assert re.search(r"policy worker +4 +1 +0", outcome.stdout)
    assert "402,176 parameters, policy TP2 x PP1 x DP2" in outcome.stdout
    assert "1,024 rows; 3 steps" in outcome.stdout
    assert not outcome.imported & HEAVY
    assert not (tmp_path / "runs").exists()


def test_cfg_prints_a_configuration_that_can_be_run_as_it_is(command: Command, tmp_path: Path) -> None:
    outcome = command("--cfg", "grpo.seed=5")
    assert outcome.exit_code == 0, outcome.stderr
    path = tmp_path / "resolved.yaml"
    path.write_text(outcome.stdout)
    assert load_config(path).grpo.seed == 5


def test_help_shows_examples(command: Command) -> None:
    outcome = command("--help")
    assert outcome.exit_code == 0
    assert "examples:" in outcome.stdout
    assert "run_grpo.py --config configs/grpo_arithmetic_cpu.yaml" in outcome.stdout
