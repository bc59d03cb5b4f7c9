from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_like.observability.disk import (
    DiskFull,
    append_whole,
    check_space,
    give_usual_mode,
    is_disk_full,
    space_for,
    whole_directory,
    write_whole,
)
from nemo_like.observability.jsonl import MetricsFile, read_metrics
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.summary import RunSummary
from tests.disks import fill, small_disk
from tests.unit.observability.test_logger import make_logger, run_two_steps


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 1 << 20) as path:
        yield path


def test_a_file_that_does_not_fit_leaves_the_one_before_it_and_says_what_is_free_and_needed(
    disk: Path,
) -> None:
    write_whole(disk / "config.yaml", b"old", "the configuration")
    fill(disk)
    with pytest.raises(
        DiskFull, match=rf"no space for the configuration: 0 B are free in {disk}, and it needs 9 kB"
    ):
        write_whole(disk / "config.yaml", b"x" * 9000, "the configuration")
    assert (disk / "config.yaml").read_bytes() == b"old"
    assert sorted(path.name for path in disk.iterdir()) == ["config.yaml", "filler"]


def test_what_the_system_does_not_permit_is_told_with_a_path(tmp_path: Path) -> None:
    told = f"Operation not permitted while the journal was written: '{tmp_path}'"
    with pytest.raises(PermissionError, match=told), space_for("the journal", tmp_path):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
    with pytest.raises(FileNotFoundError, match=str(tmp_path / "gone")), space_for("a file", tmp_path):
        (tmp_path / "gone").read_bytes()


def test_a_file_that_takes_no_more_is_named(tmp_path: Path) -> None:
    class Sealed(io.FileIO):
        def write(self, data: object) -> int:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        def truncate(self, size: int | None = None) -> int:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    path = tmp_path / "metrics.jsonl"
    with (
        Sealed(path, "a") as file,
        pytest.raises(PermissionError, match=f"Operation not permitted: '{path}'"),
    ):
        append_whole(file, b"line")


def test_metrics_are_whole_lines_also_on_a_full_disk_and_go_on_when_there_is_space_again(disk: Path) -> None:
    metrics = MetricsFile(disk / "metrics.jsonl")
    metrics.write(1, {"train/reward": 0.5})
    metrics.flush()
    filler = fill(disk)
    # More than what is left of the last page, so that a part of it is written first.
    metrics.write(2, {f"train/{index}": 0.5 for index in range(1000)})
    with pytest.raises(DiskFull, match="no space for the metrics of step 2"):
        metrics.flush()
    assert read_metrics(disk / "metrics.jsonl") == [{"step": 1, "train/reward": 0.5}]
    filler.unlink()
    metrics.write(3, {"train/reward": 0.75})
    metrics.close()
    assert [record["step"] for record in read_metrics(disk / "metrics.jsonl")] == [1, 3]


def test_a_run_ends_in_order_when_its_results_cannot_be_written(disk: Path) -> None:
    stream = io.StringIO()
    # No report, which removes what it has begun to write beside the rest, so that space is free again.
    with make_logger(RunDirectory.create(str(disk), "demo"), stream, report=None) as logger:
        run_two_steps(logger)
        fill(disk)
        assert not logger.finish(RunSummary(outcome="finished"))
    assert "warning: no space for the learning curve: 0 B are free in" in stream.getvalue()
    assert f"{disk / 'demo' / 'events.jsonl'} lacks the run's latest events: " in stream.getvalue()
    assert stream.getvalue().endswith(f"run_dir: {disk / 'demo'}\n")


def test_a_directory_that_does_not_fit_is_removed_and_the_one_before_it_stays(disk: Path) -> None:
    with whole_directory(disk / "final_hf", "the model", 10) as path:
        (path / "weights").write_bytes(b"old")
    with (
        pytest.raises(DiskFull, match="no space for the model"),
        whole_directory(disk / "final_hf", "the model", 10) as path,
    ):
        (path / "weights").write_bytes(bytes(2 << 20))
    assert [path.name for path in disk.iterdir()] == ["final_hf"]
    assert (disk / "final_hf" / "weights").read_bytes() == b"old"


def test_a_directory_takes_the_place_of_the_one_before_it(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        with whole_directory(tmp_path / "final_hf", "the model", 10) as path:
            (path / name).write_bytes(b"x")
    assert [file.name for file in (tmp_path / "final_hf").iterdir()] == ["model-2.safetensors"]


def test_what_cannot_fit_is_told_before_it_is_written(disk: Path) -> None:
    with pytest.raises(DiskFull, match=r"1\.049 MB are free in .*, and it needs 3 MB\. Keep fewer"):
        check_space("the checkpoint", disk, 3_000_000, "Keep fewer")


@pytest.mark.parametrize(
    "text",
    [
        "Error while serializing: I/O error: No space left on device (os error 28)",
        "[Errno 122] Disk quota exceeded",
    ],
)
def test_libraries_that_tell_a_full_disk_in_words_alone_are_understood(text: str, tmp_path: Path) -> None:
    with pytest.raises(DiskFull, match="no space for the model"), space_for("the model", tmp_path):
        try:
            raise ValueError(text)
        except ValueError as error:
            raise RuntimeError("a worker failed") from error


def test_another_failure_stays_what_it_is(tmp_path: Path) -> None:
    assert not is_disk_full(PermissionError(13, "Permission denied"), tmp_path)
    with pytest.raises(PermissionError), space_for("the model", tmp_path):
        raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700)])
def test_files_and_folders_get_the_mode_that_the_umask_leaves(
    tmp_path: Path, umask: int, file: int, folder: int
) -> None:
    path = tmp_path / "weights"
    path.touch(0o600)
    before = os.umask(umask)
    try:
        give_usual_mode(path)
        give_usual_mode(tmp_path)
        assert os.umask(umask) == umask  # reading it has not changed it
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == file
    assert stat.S_IMODE(tmp_path.stat().st_mode) == folder
