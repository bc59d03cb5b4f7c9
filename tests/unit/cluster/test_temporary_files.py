"""Where runs put temporary files and caches, also with a long path and without a home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_like.cluster import caches
from nemo_like.cluster.caches import INDUCTOR, cache_directory, inductor_cache
from nemo_like.cluster.private_ray import temporary_parent, temporary_parent_note
from nemo_like.preflight.child import ChildCall


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_TMPDIR", "XDG_CACHE_HOME", INDUCTOR):
        monkeypatch.delenv(name, raising=False)


def test_a_path_that_is_too_long_for_rays_sockets_is_replaced_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp/eighteen-byte")
    assert (temporary_parent(), temporary_parent_note()) == ("/tmp/eighteen-byte", None)
    monkeypatch.setattr("tempfile.tempdir", "/tmp/nineteen-bytes")
    note = temporary_parent_note()
    assert temporary_parent() == "/tmp" and note is not None
    assert note.startswith("TMPDIR=/tmp/nineteen-bytes has 19 bytes, and a path of more than 18 has no room")
    # Its length is that in bytes.
    monkeypatch.setattr("tempfile.tempdir", "/tmp/ümläut-ümläut")
    assert temporary_parent() == "/tmp" and temporary_parent_note() is not None
    monkeypatch.setenv("RAY_TMPDIR", "/somewhere")
    assert (temporary_parent(), temporary_parent_note()) == ("/somewhere", None)


@pytest.mark.parametrize("home", ["/nonexistent", "/dev/null", "/proc"])
def test_caches_of_who_has_no_home_are_temporary(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if home == "/nonexistent":  # root can make it
        monkeypatch.setattr(Path, "mkdir", _refuses)
    assert cache_directory() == tmp_path / "nemo_like-cache"


def _refuses(path: Path, **_: object) -> None:
    raise PermissionError(13, "Permission denied", str(path))


def test_nobody_knows_of_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", "/elsewhere")
    monkeypatch.setattr(caches.os.path, "expanduser", lambda path: path)
    assert cache_directory() == Path("/elsewhere/nemo_like-cache")
    assert not list(tmp_path.iterdir())


def test_a_check_before_the_run_leaves_nothing_of_the_compiler_among_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert inductor_cache() == {INDUCTOR: str(tmp_path / "cache" / "nemo_like" / "inductor")}
    with ChildCall(os.getenv, INDUCTOR, timeout_s=60.0) as child:
        assert child.result() == inductor_cache()[INDUCTOR]
    monkeypatch.setenv(INDUCTOR, "/mine")
    assert inductor_cache() == {INDUCTOR: "/mine"}
