"""Every YAML file and every command of the README and docs/ composes as it is written there."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path

import pytest
import yaml

from nemo_like.config.loader import load_config, load_sweep
from nemo_like.config.search_path import find_configuration
from tests.unit.config.checkpoints import REPOSITORY

PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
MODEL = "++policy.model_name=somewhere"


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)


def commands(page: Path) -> list[str]:
    """Return the arguments of every run_grpo.py in the page's shell blocks, one line each."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    return re.findall(r"python run_grpo\.py (.*)", text)


FILES = [(page, text) for page in PAGES for text in blocks(page, "yaml")]
COMMANDS = [(page, line) for page in PAGES for line in commands(page)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the commands name."""
    monkeypatch.chdir(tmp_path)
    (configuration,) = [text for _, text in FILES if text.startswith("# mine.yaml")]
    (readme,) = [text for _, text in FILES if text.startswith("# my.yaml")]
    (tmp_path / "mine.yaml").write_text(configuration)
    (tmp_path / "my.yaml").write_text(readme)
    for shared in ("configs", "recipes"):
        (tmp_path / shared).symlink_to(REPOSITORY / shared)
    return tmp_path


def test_there_are_examples() -> None:
    assert len(FILES) >= 6 and len(COMMANDS) >= 15


@pytest.mark.parametrize("text", [text for _, text in FILES], ids=[page.stem for page, _ in FILES])
def test_a_file_composes(text: str, folder: Path) -> None:
    has_base = any(str(entry).startswith("grpo") for entry in yaml.safe_load(text).get("defaults", []))
    based = text if has_base else re.sub(r"^defaults:\n|\A", "defaults:\n  - grpo_gpu\n", text, count=1)
    path = folder / "example.yaml"
    path.write_text(based)
    assert load_config(path, [MODEL]).grpo.num_prompts_per_step > 0


@pytest.mark.parametrize("line", [line for _, line in COMMANDS])
def test_a_command_composes(line: str, folder: Path) -> None:
    parser = argparse.ArgumentParser()
    for option in ("--config", "--config-dir", "--config-name"):
        parser.add_argument(option)
    for flag in ("--cfg", "--dry-run", "--multirun"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_intermixed_args(shlex.split(line, comments=True))
    named = "my.yaml" if given.config == "..." else given.config
    config = Path(named) if named else find_configuration(given.config_name, given.config_dir)
    load = load_sweep if given.multirun else load_config
    assert load(config, [MODEL, *given.overrides])
