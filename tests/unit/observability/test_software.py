"""What a run says of the software with which it was made."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from nemo_like.observability import software as module
from nemo_like.observability.software import software


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that needs numpy and something that is not installed."""
    file = tmp_path / "pyproject.toml"
    file.write_text(
        '[project]\ndependencies = ["numpy>=2", "no-such-package"]\n[project.optional-dependencies]\n'
    )
    monkeypatch.setattr(module, "_PROJECT", file)
    return tmp_path


def git(project: Path, *arguments: str) -> None:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run(["git", "-C", str(project), *identity, *arguments], check=True, capture_output=True)


def test_a_project_that_is_no_checkout_has_no_commit(project: Path) -> None:
    found = software()
    assert (found["commit"], found["has_changes"]) == (None, None)
    assert list(found["packages"]) == ["numpy"]
    assert re.fullmatch(r"3\.\d+\.\d+", found["python"])


def test_a_checkout_has_a_commit_and_perhaps_changes_to_it(project: Path) -> None:
    git(project, "init")
    git(project, "add", ".")
    git(project, "commit", "-m", "first")
    (project / "notes.txt").write_text("git does not track this")
    found = software()
    assert re.fullmatch("[0-9a-f]{40}", found["commit"])
    assert found["has_changes"] is False
    with (project / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert software()["has_changes"] is True
