"""The pages at the root and docs/ hold what works: every YAML file composes, every command is executed or
dry-run, and every piece of Python is one."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
import yaml

import run_grpo
from nemo_like import GRPO
from nemo_like.batch.recordings import RecordingManifest, rollout_file, write_manifest
from nemo_like.configuration import load_config
from nemo_like.driver import exit_codes
from tests.tripwires.mutations import Group
from tests.unit.config.checkpoints import write_checkpoint
from tests.unit.documented import PAGES, ROOT, Block, Command, blocks, commands
from tests.unit.forked import collected
from tests.unit.parse_only import unread

MODEL = "++policy.model_name=somewhere"
FILES = blocks("yaml")
COMMANDS = commands()
# What stands for a value of the user's own.
PLACEHOLDERS = {
    **dict.fromkeys(("MODEL", "GENERAL", "MATHEMATICIAN", "PROGRAMMER"), ".cache/models/arithmetic-d2-s1"),
    "MINE": "two_tasks.yaml",
    "HOST": "node017",
    "advantages_negated": "kl_without_gradient",
}
TWO_TASKS = """
defaults: [grpo_arithmetic_cpu, env@env.math: exact_match, env@env.code: exact_match]
data:
  train:
    - {name: math, kind: jsonl, path: train.jsonl, env: math}
    - {name: code, kind: jsonl, path: train.jsonl, env: code}
"""
MIXTURE = {"model_type": "qwen3_moe", "moe_intermediate_size": 16, "num_experts": 8, "num_experts_per_tok": 2}
# Commands of other projects, or of the system, whose own documentation is theirs to keep.
FOREIGN = (
    "bash examples/grpo_trainer/run_qwen3_8b_fsdp.sh",
    "python -m pip install --no-index",
    "python3.11 -m venv /home/me/",
    "/home/me/agents/strands/bin/pip install",
)


@pytest.fixture(scope="session")
def demo_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's models but for their weights."""
    from scripts.demo_model import tiny_tokenizer, tool_tokenizer

    directory = tmp_path_factory.mktemp("models")
    for name, sizes in (("arithmetic-d2-s1", {}), ("arithmetic-moe-d2-s1", MIXTURE)):
        write_checkpoint(directory / name, **sizes)
        tiny_tokenizer.save_tokenizer(directory / name)
    write_checkpoint(directory / "sums-s4", vocab_size=tool_tokenizer.VOCABULARY_SIZE)
    tool_tokenizer.save_tokenizer(directory / "sums-s4")
    return directory


@pytest.fixture(scope="session")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory that says that it has recorded as many steps as a run on GPUs makes."""
    directory = tmp_path_factory.mktemp("run") / "recorded"
    directory.mkdir()
    grpo = load_config(ROOT / "configs" / "grpo_cpu.yaml", [MODEL]).grpo
    write_manifest(directory, RecordingManifest(step_shape=grpo.step_shape))
    for step in range(grpo.max_num_steps):
        (directory / rollout_file(step + 1, 0)).touch()
    return directory.parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, demo_models: Path, recording: Path) -> Path:
    """A folder with the files that the commands name."""
    monkeypatch.chdir(tmp_path)
    for variable in ("SLURM_ARRAY_TASK_ID", "WANDB_API_KEY"):
        monkeypatch.setenv(variable, "1")
    (tmp_path / "lesson").mkdir()
    (tmp_path / "two_tasks.yaml").write_text(TWO_TASKS)
    for block in blocks("python"):
        if module := re.match(r"# ((?:lesson/)?\w+\.py)\b", block.text):
            (tmp_path / module[1]).write_text(block.text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mine", "my", "agent", "lesson/sums", "lesson/adder"):
        (text,) = [block.text for block in FILES if block.text.startswith(f"# {name}.yaml")]
        (tmp_path / f"{name}.yaml").write_text(text)
    for name in ("train", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "12+34=", "answer": "46"}\n' * 512)
    for shared in ("configs", "recipes"):
        (tmp_path / shared).symlink_to(ROOT / shared)
    sums = tmp_path / ".cache" / "data" / "sums"
    sums.mkdir(parents=True)
    for name in ("train", "validation"):
        (sums / f"{name}.jsonl").write_text('{"prompt": "12+34+56", "answer": "102"}\n' * 512)
    (tmp_path / ".cache" / "models").symlink_to(demo_models)
    (tmp_path / "RUN_DIR").symlink_to(recording)
    return tmp_path


def test_there_are_examples() -> None:
    assert len(FILES) >= 6 and len(COMMANDS) >= 60


@pytest.mark.parametrize("text", [block.text for block in FILES], ids=[block.page.stem for block in FILES])
def test_a_file_composes(text: str, folder: Path) -> None:
    has_base = any(str(entry).startswith("grpo") for entry in yaml.safe_load(text).get("defaults", []))
    based = text if has_base else re.sub(r"^defaults:\n|\A", "defaults:\n  - grpo_gpu\n", text, count=1)
    path = folder / "example.yaml"
    path.write_text(based)
    assert load_config(path, [MODEL]).grpo.num_prompts_per_step > 0


def dry_run(command: str) -> None:
    """``run_grpo.py``, up to where it would start, and each job of a sweep."""
    arguments = shlex.split(command.replace("--config ...", "--config my.yaml"))
    if "--what-if" in arguments:  # the run that it names is not there
        place = arguments.index("--what-if")
        arguments = [one for one in (*arguments[:place], *arguments[place + 2 :]) if one != "--json"]
    mode = [] if {"--cfg", "--dry-run"} & {*arguments} else ["--dry-run"]
    assert run_grpo.main([*arguments, *mode]) == 0


def refused(command: str) -> None:
    """``run_grpo.py`` says what a page shows, and starts nothing."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        assert run_grpo.main(shlex.split(command)) == exit_codes.REFUSED
    (problem,) = [line for line in told.getvalue().splitlines() if line.startswith("  - ")]
    assert any(problem in page.read_text(encoding="utf-8") for page in PAGES)


def written_out(module: str) -> None:
    """A script that a page has as a piece of Python."""
    done = subprocess.run([sys.executable, module], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert any(done.stdout in page.read_text(encoding="utf-8") for page in PAGES)


def read_by_its_script(command: str) -> None:
    """A script of the project, up to where it has read its arguments."""
    assert not unread(shlex.split(command), ROOT, Path("said").absolute())


def read_by_click(program: click.Command, command: str) -> None:
    """A program that others made with click, up to where it has read its arguments."""
    arguments, parent = shlex.split(command), None
    while isinstance(program, click.Group):
        parent = click.Context(program, parent=parent, info_name=program.name)
        name, chosen, arguments = program.resolve_command(parent, arguments)
        assert chosen is not None, name
        program = chosen
    program.make_context(program.name, arguments, parent=parent)


def read_by_ray(command: str) -> None:
    from ray.scripts.scripts import cli

    read_by_click(cli, command)
    if " -- python run_grpo.py " in command:
        dry_run(command.split(" -- python run_grpo.py ")[1])


def read_by_hf(command: str) -> None:
    from huggingface_hub.cli.hf import app

    read_by_click(app, command)


def made(arguments: str) -> None:
    """What make would do for a target, and the run of a demo with arguments."""
    program = ["make", "--dry-run", *shlex.split(arguments)]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "bash scripts/" in done.stdout, done.stderr
    if given := re.search(r"bash scripts/demo\.sh (?!--)(\S.*)", done.stdout):
        dry_run(f"--config configs/grpo_arithmetic_cpu.yaml {given[1]}")


def submitted(command: str) -> None:
    """A job of Slurm: the script's own arguments, which are run_grpo.py's."""
    arguments = command.split("scripts/slurm/run.sbatch", 1)[1].strip()
    if arguments:
        dry_run(arguments)


def attached(arguments: str) -> None:
    """The script says that there is no such job, where there is no Slurm."""
    program = ["bash", "scripts/slurm/attach.sh", *shlex.split(arguments)]
    nowhere = {**os.environ, "SLURM_CONF": os.devnull}
    done = subprocess.run(program, cwd=ROOT, env=nowhere, capture_output=True, text=True, check=False)
    job = shlex.split(arguments)[0]
    assert (done.returncode, done.stderr) == (1, f"attach: job {job} is not running\n")


def knows(command: str) -> None:
    """A script of the project names the options that it is given in its usage."""
    script, *options = shlex.split(command)
    usage = re.findall(r"usage: (.*)\"", (ROOT / script).read_text())
    assert all(f"[{option}]" in usage[0] for option in options)


def chooses_tests(arguments: str) -> None:
    """The tests that a command of pytest chooses: one at least."""
    code, said = collected(*shlex.split(arguments), directory=ROOT, output=Path("said").absolute())
    assert code == 0, said


def is_shell(command: str) -> None:
    """Setting a variable, or choosing an environment."""
    done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# How a command is executed or dry-run: the first pattern that it matches, and what follows the match.
KINDS: list[tuple[str, Callable[[str], None]]] = [
    (r"python run_grpo\.py (?=.* (?:grpo\.max_num_step=|cluster\.gpu_memory_gib=40 ))", refused),
    (r"python run_grpo\.py ", dry_run),
    (r"(?:PYTHONPATH=\S+ )?python (?=scripts/)", read_by_its_script),
    (r"unshare .*; python (?=scripts/.*'$)", lambda command: read_by_its_script(command.rstrip("'"))),
    (r"python (?=(?:lesson/)?\w+\.py$)", written_out),
    (r"python -m pytest ", chooses_tests),
    (r"make ", made),
    (r"ray ", read_by_ray),
    (r"hf ", read_by_hf),
    (r"(?:INTERACTIVE=1 )?sbatch ", submitted),
    (r"scripts/slurm/attach\.sh ", attached),
    (r"bash (?=scripts/setup\.sh)", knows),
    (r"export |source \.venv/bin/activate$|(?=grep )", is_shell),
    (rf"(?:{'|'.join(map(re.escape, FOREIGN))})", is_shell),
]


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_executed_or_dry_run(command: Command, folder: Path) -> None:
    line = command.line
    for placeholder, value in PLACEHOLDERS.items():
        line = re.sub(rf"\b{placeholder}\b", value, line)
    for pattern, check in KINDS:
        if match := re.match(pattern, line):
            check(line[match.end() :])
            return
    pytest.fail(f"nothing is known of how to try this: {line}")


def test_every_kind_of_command_is_there() -> None:
    unused = [pattern for pattern, _ in KINDS if not any(re.match(pattern, c.line) for c in COMMANDS)]
    assert unused == []


def mutation(*about: object) -> Callable[[object], object]:
    """Instead of the decorator of tests.tripwires, which keeps a list."""
    return lambda function: function


# What a piece of Python is told to stand beside.
CONTEXT = {
    "GRPO": GRPO,
    "rows": [{"prompt": "12+34=", "answer": "46"}],
    "reward": lambda response, answer: float(answer in response),
    "double": lambda number: 2 * int(number),
    "pytest": pytest,
    "mutation": mutation,
    "Group": Group,
    "Any": Any,
}


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: block.page.stem)
def test_a_piece_of_python_runs(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are set up, and not made."""
    train = mock.MagicMock()
    monkeypatch.setattr(GRPO, "train", train)
    exec(compile(block.text, str(block.page), "exec"), dict(CONTEXT))
    assert train.called == (".train()" in block.text)
