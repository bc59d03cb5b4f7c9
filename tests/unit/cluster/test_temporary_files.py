"""Where runs put temporary files and caches, also with a long path and without a home."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_like.cluster import private_ray
from nemo_like.cluster.private_ray import temporary_parent, temporary_parent_note
from nemo_like.observability import caches
from nemo_like.observability.caches import INDUCTOR, cache_directory, inductor_cache, matplotlib_directory
from nemo_like.preflight.child import ChildCall


@pytest.fixture(autouse=True)
def variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "RAY_TMPDIR",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "RAY_AUTH_TOKEN",
        "RAY_AUTH_TOKEN_PATH",
        "MPLCONFIGDIR",
        INDUCTOR,
    ):
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
    cache = tmp_path / "nemo_like-cache"
    assert cache_directory() == cache
    assert matplotlib_directory() == {"MPLCONFIGDIR": str(cache / "matplotlib")}


def _refuses(path: Path, **_: object) -> None:
    raise PermissionError(13, "Permission denied", str(path))


def test_nobody_knows_of_a_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", "/elsewhere")
    monkeypatch.setattr(caches.os.path, "expanduser", lambda path: path)
    assert cache_directory() == Path("/elsewhere/nemo_like-cache")
    assert not list(tmp_path.iterdir())


def test_rays_token_is_in_the_home_or_else_with_the_run_for_its_user_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    home, run = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    run.mkdir()
    monkeypatch.setenv("HOME", str(home))
    assert private_ray._token(run) == {}
    monkeypatch.setenv("HOME", "/proc")
    assert private_ray._token(run) == {"RAY_AUTH_TOKEN_PATH": str(run / "auth_token")}
    token = (run / "auth_token").read_text()
    assert len(token) == 64 and (run / "auth_token").stat().st_mode & 0o777 == 0o600
    # A process reads its token once, also where it starts a Ray again.
    (run / "auth_token").unlink()
    private_ray._token(run)
    assert (run / "auth_token").read_text() == token
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the user's own")
    assert private_ray._token(run) == {}


def test_a_check_before_the_run_leaves_nothing_of_the_compiler_among_temporary_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert inductor_cache() == {INDUCTOR: str(tmp_path / "cache" / "nemo_like" / "inductor")}
    with ChildCall(os.getenv, INDUCTOR, timeout_s=60.0) as child:
        assert child.result() == inductor_cache()[INDUCTOR]
    monkeypatch.setenv(INDUCTOR, "/mine")
    assert inductor_cache() == {INDUCTOR: "/mine"}
