"""The tutorials whose reader writes files: their files and commands, in the order of the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_like.driver import exit_codes
from tests.functional.runs import FEWEST_PROCESSES, ROOT, read_metrics
from tests.unit.documented import Block, blocks

pytestmark = [pytest.mark.slow, pytest.mark.whole_run, pytest.mark.timeout(900)]

SMALL = [
    *("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "grpo.val_period=0"),
    *("grpo.max_val_samples=16", "policy.train_global_batch_size=16", "logger.wandb.mode=disabled"),
    *("checkpointing.export_final_hf=false", *FEWEST_PROCESSES),
]


@dataclass(frozen=True)
class Lesson:
    """A tutorial that ends with a mistake, which its reader makes in a file."""

    page: str
    run: str
    num_steps: int  # as many as have the samples that the page shows
    file: str
    right: str
    wrong: str
    said: str
    exit_code: int

    def blocks(self) -> Iterator[Block]:
        """Yield the pieces of the page that are files or commands."""
        return (block for block in blocks("python", "yaml", "sh") if block.page.stem == self.page)


LESSONS = [
    Lesson(
        page="your_data",
        run="sums",
        num_steps=10,
        file="lesson/sums_reward.py",
        right="turn.response ==",
        wrong="turn.reponse ==",
        said="the reward raised AttributeError: 'Turn' object has no attribute 'reponse'",
        exit_code=exit_codes.FAILED,
    ),
    Lesson(
        page="agent",
        run="adder",
        num_steps=5,
        file="lesson/adder.py",
        right='arguments["value"]',
        wrong='arguments["sum"]',
        said="raised 16 times: the agent raised KeyError: 'sum'",
        exit_code=exit_codes.REWARDS_FAILED,
    ),
]


@pytest.fixture
def folder(arithmetic_model: str, sums_model: str, tmp_path: Path) -> Path:
    """The folder of the repository, in which the reader's files are alone."""
    for name in ("scripts", "configs", "run_grpo.py", ".cache"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "lesson").mkdir()
    return tmp_path


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.page)
def test_a_tutorial_leads_from_its_first_file_to_the_mistake_at_its_end(lesson: Lesson, folder: Path) -> None:
    for block in lesson.blocks():
        if block.language != "sh":
            write(block, folder)
            continue
        for command in block.text.splitlines():
            if "broken" not in command:
                done = execute(small(command, lesson), folder)
                assert done.returncode == 0, done.stdout + done.stderr
                continue
            file = folder / lesson.file
            assert file.read_text().count(lesson.right) == 1
            file.write_text(file.read_text().replace(lesson.right, lesson.wrong))
            done = execute(small(command, lesson), folder)
            assert done.returncode == lesson.exit_code, done.stdout + done.stderr
            assert lesson.said in done.stdout + done.stderr
    assert sorted(path.name for path in (folder / "runs").iterdir()) == sorted(runs_of(lesson))
    assert [record["step"] for record in read_metrics(folder / "runs" / lesson.run)][-1] == lesson.num_steps


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.page)
def test_the_run_of_a_tutorial_learns(lesson: Lesson, folder: Path) -> None:
    for block in lesson.blocks():
        if block.language != "sh":
            write(block, folder)
            continue
        for command in block.text.splitlines():
            if re.match(r"python lesson/\w+\.py$", command) or f"logger.run_name={lesson.run} " in command:
                done = execute(command, folder)
                assert done.returncode == 0, done.stdout + done.stderr
    records = read_metrics(folder / "runs" / lesson.run)
    accuracy = [record["validation/accuracy"] for record in records if "validation/accuracy" in record]
    assert accuracy[-1] >= accuracy[0] + 0.3


def runs_of(lesson: Lesson) -> set[str]:
    """Return the names that the page gives to its runs."""
    return {name for block in lesson.blocks() for name in re.findall(r"logger\.run_name=(\w+)", block.text)}


def write(block: Block, folder: Path) -> None:
    """Write a piece of the page to the file that its first line names."""
    named = re.match(r"# (lesson/\w+\.(?:py|yaml))\n", block.text)
    assert named is not None, block.text
    (folder / named[1]).write_text(block.text)


def small(command: str, lesson: Lesson) -> str:
    """Return the command with a run of few samples in place of the page's."""
    if "run_grpo.py" not in command:
        return command
    return " ".join([command, *SMALL, f"grpo.max_num_steps={lesson.num_steps}"])


def execute(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Execute a command as a shell with the environment of this Python does."""
    if command == "source .venv/bin/activate":
        command = "true"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(folder)}
    return subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
