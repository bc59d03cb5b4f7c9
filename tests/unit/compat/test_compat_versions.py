"""What makes private parts of other libraries work says of which version they are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.unit.documented import ROOT

MODULES = sorted(path for path in (ROOT / "nemo_like" / "compat").glob("*.py") if path.stem != "__init__")
PINS = {
    name.removesuffix("-cpu"): version
    for name, version in re.findall(
        r"^([\w-]+)==([\w.]+)",
        (ROOT / "requirements" / "cpu.txt").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
} | {"Python": "3.11"}


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_module_names_the_versions_that_are_pinned(module: Path) -> None:
    text = " ".join((ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split())
    named = re.findall(r"\b([\w-]+) (\d+\.\d+(?:\.\d+)?)\b", text)
    versions = [(name, version) for name, version in named if name in PINS]
    assert versions, "names no library with its version"
    assert [(name, PINS[name]) for name, _ in versions] == versions


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_a_module_says_when_it_can_go(module: Path) -> None:
    text = " ".join((ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split())
    assert "This module can go" in text
