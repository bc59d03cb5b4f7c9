"""A node that cannot compile C is named before an engine starts there."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import pytest

from nemo_like.cluster.actor_errors import ClusterError
from nemo_like.cluster.c_compiler import compiling_problem
from nemo_like.cluster.placement import check_compilers


def test_want_of_a_compiler_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert compiling_problem() == "there is no C compiler: neither gcc nor clang, and CC names none"


def test_a_compiler_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/nowhere/gcc")
    assert (compiling_problem() or "").startswith("/nowhere/gcc cannot be used: [Errno 2]")


def compiler(path: Path, script: str) -> str:
    """An executable that is called as a compiler is."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_want_of_pythons_headers_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = "<stdin>:1:10: fatal error: Python.h: No such file or directory"
    cc = compiler(tmp_path / "gcc", f"echo '{said}' >&2; echo 'compilation terminated.' >&2; exit 1")
    monkeypatch.setenv("CC", cc)
    assert compiling_problem() == f"{cc} cannot compile what includes Python.h: {said}"


def test_the_compiler_is_asked_with_the_headers_of_this_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    script = f'(echo "$@"; cat) > {asked}'
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.delenv("CC", raising=False)
    compiler(tmp_path / "gcc", script)
    assert compiling_problem() is None
    options = f"-fsyntax-only -I{sysconfig.get_path('include')} -x c -"
    assert asked.read_text() == f"{options}\n#include <Python.h>\n"


def test_all_nodes_without_one_are_named_with_what_to_install() -> None:
    check_compilers({"10.0.0.1": None})
    with pytest.raises(ClusterError) as caught:
        check_compilers({"10.0.0.1": None, "10.0.0.2": "there is none", "10.0.0.3": "no Python.h"})
    told = str(caught.value)
    assert told.startswith("node 10.0.0.2: there is none; node 10.0.0.3: no Python.h. Triton, which")
    assert "install gcc and Python's headers" in told
