"""What holds of every script: a test runs it to its end, and what it and the messages name is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"
SOURCES = [ROOT / "run_grpo.py", *sorted((ROOT / "nemo_like").rglob("*.py")), *sorted(SCRIPTS.rglob("*.py"))]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
SET_UP = "bash scripts/setup.sh --dev"
FOLDERS = "docs|configs|recipes|scripts|requirements|tests|nemo_like"
# A path from the root, unless it is a pattern or a part of one.
NAMED_PATH = re.compile(rf"(?<![\w/.~-])(?:{FOLDERS})/[\w./-]*[A-Za-z0-9](?!\.?[\w*/<{{-])")
PLACEHOLDER = re.compile(r"/X\.yaml$")
NAMED_EXTRA = re.compile(r"pip install [^;\n]*'[\w.]+\[(\w+)\]'")
COMMENT = re.compile(r"(?:^|\s)# .*")  # may name a page of another project


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def imports(tree: ast.AST) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def is_program(path: Path) -> bool:
    """Return whether a file of scripts/ is there to be called."""
    return path.suffix in (".sh", ".sbatch") or (path.suffix == ".py" and "__main__" in text_of(path))


def called_by(modules: Iterable[Path]) -> set[str]:
    """Return the names of the files that modules call as a program, or whose ``main`` they call."""
    text = "\n".join(map(text_of, modules))
    named = re.findall(r"""["'/](\w+\.(?:py|sh|sbatch))["']""", text)
    return {*named, *(f"{module}.py" for module in re.findall(r"from scripts\.(\w+) import main\b", text))}


PROGRAMS = [path for path in sorted(SCRIPTS.rglob("*")) if is_program(path)]
BY_TESTS = called_by([*ROOT.glob("tests/**/test_*.py"), *ROOT.glob("tests/**/conftest.py")])
# What only another script starts, of which there is a test.
BY_GPU_CHECK = called_by([SCRIPTS / "gpu_check_parts" / "commands.py"])
BY_SLURM = set(re.findall(r"\$PWD/scripts/slurm/([\w.]+)", (SCRIPTS / "slurm" / "run.sbatch").read_text()))


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.relative_to(SCRIPTS).as_posix())
def test_a_test_calls_every_script(path: Path) -> None:
    remedy = f"add a test that runs {path.relative_to(ROOT)} to its end, at its smallest size"
    assert path.name in BY_TESTS | BY_GPU_CHECK | BY_SLURM, remedy


def test_a_script_that_uses_modules_of_the_tests_says_so_and_names_the_set_up() -> None:
    users = [path for path in PROGRAMS if re.search(r"^\s*(?:from|import) tests\b", text_of(path), re.M)]
    assert SCRIPTS / "chaos.py" in users
    for path in users:
        tree = ast.parse(text_of(path))
        assert f"needs what they need: {SET_UP}" in str(ast.get_docstring(tree)), path
        guards = [node for node in ast.walk(tree) if isinstance(node, ast.With)]
        guards = [one for one in guards if ast.unparse(one.items[0]) == "packages_of_the_tests()"]
        guarded = [one for guard in guards for one in guard.body]
        assert [one for one in imports(tree) if str(one.module).startswith("tests.")] == guarded, path


def test_a_package_that_only_the_tests_need_is_missed_in_one_line_with_the_remedy() -> None:
    without = "import runpy, sys; sys.modules['pytest'] = None; sys.argv = sys.argv[1:]; "
    start = "runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", without + start, "scripts/chaos.py", "--seed", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (2, "")
    said = f"chaos.py uses modules of tests/, which need pytest; it is not installed: {SET_UP}"
    assert done.stderr == f"{said}\n"


def test_a_conversion_of_what_is_not_there_says_what_is(tmp_path: Path) -> None:
    def refusal(source: Path) -> str:
        command = [sys.executable, "scripts/convert_checkpoint.py", str(source), "--output", "models/none"]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
        assert ended.returncode == 2
        return ended.stderr.strip()

    (tmp_path / "checkpoints" / "step_4").mkdir(parents=True)
    assert refusal(tmp_path / "run") == (
        f"convert_checkpoint: {tmp_path}/run is no directory; name a run directory, or a step_N in its "
        "checkpoints"
    )
    assert refusal(tmp_path / "checkpoints" / "step_9").endswith(
        f"step_9 is no directory; {tmp_path}/checkpoints has step_4"
    )
    assert f"{tmp_path} is neither a run directory (config.yaml) nor a step_N" in refusal(tmp_path)


def test_files_and_extras_that_messages_name_are_there() -> None:
    text = COMMENT.sub("", "\n".join(map(text_of, SOURCES)))
    paths = {path for path in NAMED_PATH.findall(text) if not PLACEHOLDER.search(path)}
    extras = set(NAMED_EXTRA.findall(text))
    assert len(paths) > 60 and "sweep" in extras
    assert sorted(path for path in paths if not (ROOT / path).exists()) == []
    assert extras <= EXTRAS.keys()
