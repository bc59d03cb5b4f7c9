"""``run_grpo.py`` as a user calls it: what cannot run stops in seconds, before anything heavy is loaded."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from nemo_like.configuration import load_config
from nemo_like.observability.run_lock import DirectoryLock
from tests.unit.config.checkpoints import DEMO, REPOSITORY, write_checkpoint
from tests.unit.what_if.test_calibration import write_run

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


Command = Callable[..., Outcome]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")

    def run(*arguments: str, config: str = str(DEMO), **environment: str) -> Outcome:
        there = [f"policy.model_name={checkpoint}", f"logger.log_dir={tmp_path / 'runs'}"]
        line = [sys.executable, "-X", "importtime", "run_grpo.py", "--config", config, *there, *arguments]
        before = os.times()
        done = subprocess.run(
            line,
            cwd=REPOSITORY,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        after = os.times()
        lines = done.stderr.splitlines()
        modules = [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")]
        return Outcome(
            exit_code=done.returncode,
            stdout=done.stdout,
            stderr="\n".join(line for line in lines if not line.startswith("import time:")),
            imported=frozenset(module.partition(".")[0] for module in modules),
            cpu_s=after.children_user + after.children_system - before.children_user - before.children_system,
        )

    return run


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("grpo.num_prompt_per_step=8", "did you mean grpo.num_prompts_per_step?"),
        pytest.param(
            "++policy.foo=bar", "policy.foo is not a key of the configuration", marks=pytest.mark.slow
        ),
        pytest.param(
            "policy.device=gpu", "policy.device='gpu' must be one of cpu, cuda", marks=pytest.mark.slow
        ),
        pytest.param(
            "policy.train_global_batch_size=500",
            "must divide the N = 128 prompts x 8 generations",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "policy.megatron_cfg.tensor_model_parallel_size=3",
            "must divide the model's 4 attention heads",
            marks=pytest.mark.slow,
        ),
        ("policy.model_name=/nowhere/model", "policy.model_name=/nowhere/model is not a directory"),
        ("cluster.num_cpus=2", "cluster.num_cpus=2 must be at least 7: TransferQueue controller 1 x 1"),
        pytest.param(
            "generation.temperature=0", "generation.temperature=0.0 must be above 0", marks=pytest.mark.slow
        ),
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
    assert outcome.cpu_s < LIMIT_S


@pytest.mark.parametrize(
    ("name", "key"), [("taken", "logger.run_name"), ("kept", "checkpointing.checkpoint_dir")]
)
def test_a_directory_that_another_run_holds_is_left_as_it_is(
    command: Command, tmp_path: Path, name: str, key: str
) -> None:
    directory = tmp_path / "runs" / name
    DirectoryLock(directory)
    before = sorted(directory.rglob("*"))
    outcome = command(f"{key}={name if key == 'logger.run_name' else directory}")
    assert outcome.exit_code == 2
    assert f"{directory} is in use: process {os.getpid()} on host" in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert "starting Ray" not in outcome.stdout
    assert [path for path in sorted(directory.rglob("*")) if path.name != "logs"] == before


def test_bad_data_are_found_with_their_lines_before_anything_starts(command: Command, tmp_path: Path) -> None:
    """In a terminal that lacks the characters of a path, too."""
    train, held_out = tmp_path / "lernen-größer.jsonl", tmp_path / "held_out.jsonl"
    train.write_text('{"prompt": "1+1=", "answer": "2"}\n' * 5 + '{"prompt": "1+2=", "answer"\n')
    held_out.write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "", "answer": "2"}\n')
    outcome = command(
        f"data.train={{kind: jsonl, path: '{train}'}}",
        f"data.validation={{kind: jsonl, path: {held_out}}}",
        f"policy.model_name={write_checkpoint(tmp_path / 'Qwen3-8B')}",
        PYTHONIOENCODING="ascii",
    )
    assert outcome.exit_code == 2
    rule = ":6: not valid JSON: Expecting ':' delimiter at column 28"
    assert rf"lernen-gr\xf6\xdfer.jsonl{rule}" in outcome.stderr
    assert f"{held_out}:2: 'prompt' is an empty prompt" in outcome.stderr
    assert "has a tokenizer that cannot be loaded" in outcome.stderr  # its files are empty
    assert "Traceback" not in outcome.stderr
    assert not outcome.imported & HEAVY
    assert not (tmp_path / "runs").exists()


def test_all_problems_of_a_configuration_are_told_at_once(command: Command) -> None:
    outcome = command("generation.temperature=0", "cluster.num_cpus=2", "generation.top_p=0.5")
    assert outcome.stderr.startswith("3 problems in the configuration:")


def test_a_config_file_that_is_not_there_proposes_the_nearest(command: Command) -> None:
    outcome = command(config="configs/grpo_arithmetic_cp.yaml")
    assert outcome.exit_code == 2
    expected = "configs/grpo_arithmetic_cp.yaml is not a file; did you mean configs/grpo_arithmetic_cpu.yaml?"
    assert expected in outcome.stderr


def test_what_if_prints_predictions_without_loading_anything_heavy(command: Command, tmp_path: Path) -> None:
    run = write_run(tmp_path / "recorded")
    sizes = ("grpo.num_prompts_per_step=2", "grpo.num_generations_per_prompt=2")
    arguments = (*sizes, "policy.train_global_batch_size=2", "grpo.val_period=0", "--what-if", str(run))
    outcome = command(*arguments)
    assert outcome.exit_code == 0, outcome.stderr
    assert "max_staleness=1 in_flight" in outcome.stdout
    assert "shortest step:" in outcome.stdout
    assert outcome.imported & HEAVY == frozenset()
    assert json.loads(command(*arguments, "--json").stdout)["best"]["step_s"] > 0

    (run / "rollout_times.jsonl").unlink()
    outcome = command(*arguments)
    assert (outcome.exit_code, outcome.stdout) == (2, "")
    assert "make a few steps with rollout.record_times=true" in outcome.stderr


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


def test_ctrl_c_while_own_code_is_looked_at_ends_it_at_once_with_its_process(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    hang = f"import os, time\nopen({str(pipe)!r}, 'w').write(str(os.getpid()))\ntime.sleep(1000)\n"
    (tmp_path / "hanging_rewards.py").write_text(hang)
    arguments = [
        "env.arithmetic.kind=function",
        "++env.arithmetic.options={function: 'hanging_rewards:f', arguments: {}}",
    ]
    there = [f"policy.model_name={write_checkpoint(tmp_path / 'checkpoint')}", f"logger.log_dir={tmp_path}"]
    # Tests in the background of a shell ignore SIGINT, which the program would inherit.
    line = ["env", "--default-signal=INT", sys.executable, "run_grpo.py", "--config", str(DEMO)]
    with subprocess.Popen(
        [*line, *there, *arguments],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        child = psutil.Process(int(pipe.read_text()))  # waits until the module is being imported
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines() == [
        "looking at data and own code before anything starts",
        "interrupted before anything started",
    ]
    assert not child.is_running()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The program and what it imports, without the installed packages."""
    directory = tmp_path / "clone"
    directory.mkdir()
    shutil.copy(REPOSITORY / "run_grpo.py", directory)
    for name in ("nemo_like", "configs"):
        (directory / name).symlink_to(REPOSITORY / name)
    return directory


def without_packages(clone: Path) -> subprocess.CompletedProcess[str]:
    """--help, by a Python that has the standard library alone."""
    bare = {"PATH": "/usr/bin:/bin", "PYTHONNOUSERSITE": "1"}
    interpreter = Path(sys.base_prefix) / "bin" / "python3"
    line = [str(interpreter), "-S", "run_grpo.py", "--help"]
    return subprocess.run(line, cwd=clone, env=bare, capture_output=True, text=True, timeout=60, check=False)


def test_a_shell_that_has_not_activated_the_environment_gets_it_all_the_same(clone: Path) -> None:
    (clone / ".venv").symlink_to(sys.prefix)
    done = without_packages(clone)
    assert done.returncode == 0, done.stderr
    assert "examples:" in done.stdout


def test_without_an_environment_it_says_how_to_make_one(clone: Path) -> None:
    done = without_packages(clone)
    assert done.returncode == 1
    assert f"{clone}/.venv. `make demo` and `bash scripts/setup.sh` put them there" in done.stderr
    assert "Traceback" not in done.stderr
