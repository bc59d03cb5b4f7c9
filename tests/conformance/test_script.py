"""``scripts/conformance.py`` as its page names it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_is_written_with_the_answers_of_another_framework(tmp_path: Path) -> None:
    """The framework is the version that this environment has, so that nothing is fetched."""
    page, trl = tmp_path / "page.md", version("trl")
    command = [sys.executable, "scripts/conformance.py", "--against", f"trl=={trl}", "--output", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"trl {trl}: " in done.stdout.lower()
    assert trl in page.read_text(encoding="utf-8")
