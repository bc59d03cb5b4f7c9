"""Logs that are kept short, with limits of a few bytes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_like.observability import bounded_log
from nemo_like.observability.bounded_log import BoundedLog, kept_short


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "actor.log"


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


def small(path: Path) -> BoundedLog:
    return BoundedLog(path, max_bytes=40, kept_bytes=12)


def test_a_short_log_stays_as_it_is(path: Path) -> None:
    append(path, b"a\n" * 20)
    small(path).cut()
    assert path.read_bytes() == b"a\n" * 20


def test_whole_lines_of_beginning_and_end_are_kept_and_the_rest_is_counted(path: Path) -> None:
    append(path, b"first\n" + b"middle\n" * 10 + b"last\n")
    small(path).cut()
    # Of 6 + 70 + 5 bytes the first 12 have one whole line, without its end, and the last 12 have two.
    assert path.read_bytes() == b"first\n--- 64 bytes were left out here ---\nmiddle\nlast\n"


def test_a_second_cut_counts_what_the_first_left_out_also_in_another_process(path: Path) -> None:
    append(path, b"first\n" + b"middle\n" * 10 + b"last\n")
    small(path).cut()
    append(path, b"more\n" * 4)
    small(path).cut()
    assert path.read_bytes() == b"first\n--- 86 bytes were left out here ---\nmore\nmore\n"


def test_a_line_without_an_end_is_cut_too(path: Path) -> None:
    append(path, b"x" * 100)
    small(path).cut()
    assert path.read_bytes() == b"x" * 12 + b"\n--- 75 bytes were left out here ---\n" + b"x" * 13


def test_what_is_no_log_is_left_alone(path: Path) -> None:
    small(path).cut()
    assert not path.exists()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=90).filter(lambda part: b"---" not in part), min_size=1))
def test_whatever_is_appended_a_log_stays_short_and_nothing_goes_uncounted(
    path: Path, parts: list[bytes]
) -> None:
    path.unlink(missing_ok=True)
    log = small(path)
    for part in parts:
        append(path, part)
        log.cut()
        assert path.stat().st_size <= 90 + 80
    content, written = path.read_bytes(), b"".join(parts)
    mark = re.search(rb"\n--- ([0-9,]+) bytes were left out here ---\n", content)
    if mark is None:
        assert content == written
        return
    assert written.startswith(content[: mark.start()])
    assert written.endswith(content[mark.end() :])
    assert len(content) - len(mark[0]) + int(mark[1].replace(b",", b"")) == len(written)


def test_a_log_is_cut_while_others_write_and_once_more_at_the_end(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_log, "_PERIOD_S", 0.001)
    monkeypatch.setattr(bounded_log, "MAX_BYTES", 1000)
    monkeypatch.setattr(bounded_log, "KEPT_BYTES", 100)
    with kept_short(path), path.open("ab", buffering=0) as file:
        for number in range(2000):
            file.write(b"line %d\n" % number)
    lines = path.read_bytes().splitlines()
    assert path.stat().st_size <= 1000
    assert lines[0] == b"line 0"
    # What is written in the moment of a cut may be lost.
    assert lines[-1].startswith(b"line ")
    assert b" bytes were left out here ---\n" in path.read_bytes()
