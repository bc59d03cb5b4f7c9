"""An engine's journal is read as it was written; what is none is refused with its file and line."""

from __future__ import annotations

import dataclasses
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.configuration import Config
from nemo_like.generation.engine_journal import (
    JournalError,
    JournalWriter,
    RequestsAborted,
    RequestsAdded,
    StepsRan,
    WeightsTaken,
    journal_settings,
    read_journal,
    request_digest,
)
from nemo_like.generation.interface import GroupRequest
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.observability.disk import DiskFull

SETTINGS = {"seed": 0, "max_num_seqs": 8, "quantization": None}
SAMPLING = SamplingSettings(1.0, 1.0, 0, 12, (1,))
START = json.dumps({"event": "start", "engine": "engine-0", "settings": SETTINGS})


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "engine-0.jsonl"
    writer = JournalWriter(path, "engine-0", SETTINGS)
    writer.added(0, [("a", 11), ("b", 12)])
    writer.aborted(3, ["b"])
    writer.took_weights(3, 1, ["a"])
    writer.finished_mixed(9, "a", [[(0, 0), (1, 3)], [(0, 0)]])
    writer.added(9, [("c", 13)])
    writer.ran(12)
    writer.flush()
    journal = read_journal(path)
    assert journal.settings == SETTINGS
    assert journal.events == (
        RequestsAdded(0, (("a", 11), ("b", 12)), line=2),
        RequestsAborted(3, ("b",), line=3),
        WeightsTaken(3, 1, line=4),
        RequestsAdded(9, (("c", 13),), line=6),
        StepsRan(12, line=7),
    )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[3]["running"] == ["a"]
    assert lines[4]["versions"] == [[[0, 0], [1, 3]], [[0, 0]]]


def test_events_reach_the_file_with_new_weights_and_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "engine-0.jsonl"
    writer = JournalWriter(path, "engine-0", SETTINGS)
    writer.added(0, [("a", 1)])
    assert read_journal(path).events == ()
    writer.took_weights(2, 1, ["a"])
    assert len(read_journal(path).events) == 2
    writer.added(4, [("b", 2)])
    assert len(read_journal(path).events) == 2
    writer.flush()
    assert len(read_journal(path).events) == 3


def test_a_journal_never_takes_the_place_of_another(tmp_path: Path) -> None:
    path = write(tmp_path / "engine-0.jsonl", START)
    with pytest.raises(FileExistsError, match=r"engine-0\.jsonl"):
        JournalWriter(path, "engine-0", SETTINGS)
    assert path.read_text() == START + "\n"


def test_a_full_disk_loses_no_event_and_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine-0.jsonl"
    writer = JournalWriter(path, "engine-0", SETTINGS)
    writer.added(0, [("a", 1)])
    really_open = Path.open

    class Full:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *error: object) -> None:
            self._file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, data: bytes) -> int:
            if len(data) < 20:
                raise OSError(errno.ENOSPC, "No space left on device")
            return int(self._file.write(data[:20]))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda self, *args, **kwargs: Full(really_open(self, *args, **kwargs)))
        with pytest.raises(DiskFull, match="an engine's journal"):
            writer.flush()
    assert read_journal(path).events == ()
    assert path.read_text().endswith("\n")
    writer.flush()
    assert read_journal(path).events == (RequestsAdded(0, (("a", 1),), line=2),)


def test_a_line_that_was_cut_short_at_the_end_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path / "cut.jsonl", START, {"step": 0, "event": "weights", "version": 0})
    path.write_text(path.read_text() + '{"step": 4, "eve')
    assert read_journal(path).events == (WeightsTaken(0, 0, line=2),)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], r"bad\.jsonl: is empty"),
        ([{"step": 0, "event": "weights", "version": 0}], r"bad\.jsonl:1: is no .*and so no journal"),
        ([START, "{"], r"bad\.jsonl:2: is no JSON"),
        ([START, "[1]"], r"bad\.jsonl:2: is no JSON object"),
        ([START, "[" * 100_000], r"bad\.jsonl:2: is no JSON"),
        (
            [START, {"step": 0, "event": "wights"}],
            r"bad\.jsonl:2: has event='wights'; known are add, abort",
        ),
        ([START, {"step": 0, "event": "add", "requests": ["a"]}], r"bad\.jsonl:2: is no 'add' event"),
        (
            [START, {"step": 0, "event": "weights"}],
            r"bad\.jsonl:2: is no 'weights' event: KeyError",
        ),
        (
            [
                START,
                {"step": 5, "event": "abort", "requests": ["a"]},
                {"step": 4, "event": "abort", "requests": ["b"]},
            ],
            r"bad\.jsonl:3: is of step 4, after an event of step 5",
        ),
    ],
)
def test_what_is_no_journal_is_refused_with_its_line(
    tmp_path: Path, lines: list[object], message: str
) -> None:
    with pytest.raises(JournalError, match=message):
        read_journal(write(tmp_path / "bad.jsonl", *lines))


def test_an_engine_with_other_settings_cannot_replay_it(tmp_path: Path) -> None:
    journal = read_journal(write(tmp_path / "engine-0.jsonl", START))
    journal.check_settings(SETTINGS)
    with pytest.raises(JournalError, match=r"engine-0\.jsonl:1: .* max_num_seqs=8, and .* max_num_seqs=16"):
        journal.check_settings({**SETTINGS, "max_num_seqs": 16})
    with pytest.raises(JournalError, match="precision=None, and this one has precision=float32"):
        journal.check_settings({**SETTINGS, "precision": "float32"})


def test_the_arguments_of_vllm_are_settings_too(demo: Callable[..., Config]) -> None:
    plain, blocks, more_blocks = (
        journal_settings("0.32", demo(*more).generation, WeightUpdates.in_flight, {})
        for more in (
            [],
            ["generation.vllm_kwargs={num_gpu_blocks_override: 64}"],
            ["generation.vllm_kwargs={num_gpu_blocks_override: 65}"],
        )
    )
    assert blocks == plain | {"vllm_kwargs": {"num_gpu_blocks_override": 64}}
    assert more_blocks != blocks


def test_a_digest_tells_apart_what_gives_other_responses() -> None:
    one = GroupRequest("a", (3, 4, 5), (16, 17))
    others = [
        (dataclasses.replace(one, prompt_ids=(3, 4, 6)), SAMPLING),
        (dataclasses.replace(one, seeds=(17, 18)), SAMPLING),
        (dataclasses.replace(one, seeds=(16, 17, 18)), SAMPLING),
        (dataclasses.replace(one, images=(b"png",)), SAMPLING),
        (one, dataclasses.replace(SAMPLING, max_new_tokens=13)),
    ]
    digests = [request_digest(*other) for other in others]
    assert len({request_digest(one, SAMPLING), *digests}) == len(others) + 1
    assert request_digest(dataclasses.replace(one, request_id="b"), SAMPLING) == request_digest(one, SAMPLING)


def test_a_journal_that_is_no_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", START)
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(JournalError, match=r"bad\.jsonl:2: is no JSON"):
        read_journal(path)
