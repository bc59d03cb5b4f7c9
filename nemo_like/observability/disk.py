"""Writes files and directories completely or not at all, and says where a disk is full and what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from nemo_like.config.units import format_size

_REMEDY = "Free some space, then run again: a run with a logger.run_name continues from its last checkpoint"
_FULL = (errno.ENOSPC, errno.EDQUOT)
# With fewer free bytes, a full disk counts as the cause of any error while writing: not every library
# says so.
_FULL_BYTES = 1 << 20


class DiskFull(RuntimeError):
    """A disk is full. The message says where, how much is free and needed, and what to do."""


def disk_full(what: str, directory: Path, needed_bytes: int | None, remedy: str = _REMEDY) -> DiskFull:
    """Return the error of a disk without space for ``what``; ``needed_bytes`` is None when it is unknown."""
    free = format_size(_free_bytes(directory))
    needed = "more is needed" if needed_bytes is None else f"it needs {format_size(needed_bytes)}"
    return DiskFull(f"no space for {what}: {free} are free in {directory}, and {needed}. {remedy}")


def is_disk_full(error: BaseException, directory: Path) -> bool:
    """Return whether an error, or one of its causes, comes from a full disk or quota below ``directory``.

    Some libraries say so only in the text of their error, or not at all; so any error counts while almost
    nothing is free.
    """
    if _free_bytes(directory) < _FULL_BYTES:
        return True
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DiskFull) or (isinstance(cause, OSError) and cause.errno in _FULL):
            return True
        if any(os.strerror(number) in str(cause) for number in _FULL):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def full_directory(error: BaseException, *directories: Path) -> Path | None:
    """Return the directory whose full disk caused an error; None for other errors.

    An error that names no directory is about the directory whose disk has nothing free, or else the first.
    """
    full = [directory for directory in directories if _free_bytes(directory) < _FULL_BYTES]
    return next(iter(full), directories[0] if is_disk_full(error, directories[0]) else None)


def check_space(what: str, directory: Path, needed_bytes: int, remedy: str = _REMEDY) -> None:
    """Raise DiskFull when the disk of ``directory`` has less than ``needed_bytes`` free."""
    if _free_bytes(directory) < needed_bytes:
        raise disk_full(what, directory, needed_bytes, remedy)


@contextmanager
def space_for(
    what: str, directory: Path, needed_bytes: int | None = None, remedy: str = _REMEDY
) -> Iterator[None]:
    """Run the ``with`` block, which writes ``what`` below ``directory``, and raise DiskFull if the disk gets
    full.

    Any other OSError of the block is raised with a path.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, DiskFull) and is_disk_full(error, directory):
            raise disk_full(what, directory, needed_bytes, remedy) from error
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            # An error on an open file names no path.
            raise OSError(
                error.errno, f"{error.strerror} while {what} was written", str(directory)
            ) from error
        raise


def write_whole(path: Path, contents: bytes | memoryview, what: str) -> None:
    """Write a file completely, or leave the existing file as it is. Raises DiskFull or OSError.

    Writes a temporary file beside it, and renames that once it is complete.
    """
    aside = path.with_name(f"{path.name}.tmp")
    with space_for(what, path.parent, len(contents)):
        try:
            aside.write_bytes(contents)
            aside.replace(path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


def append_whole(file: FileIO, line: bytes) -> None:
    """Append a complete line to an unbuffered file, or restore the file and raise OSError."""
    size = os.fstat(file.fileno()).st_size
    try:
        written = 0
        while written < len(line):
            written += file.write(line[written:])
    except OSError as error:
        with suppress(OSError):  # the first error says why
            file.truncate(size)
        raise OSError(error.errno, error.strerror, os.fspath(file.name)) from error


@contextmanager
def whole_directory(path: Path, what: str, needed_bytes: int) -> Iterator[Path]:
    """Give the ``with`` block a temporary directory to write into, which then takes the place of ``path``.

    When the block raises, the temporary directory is removed and ``path`` stays as it was. Raises DiskFull
    when the disk gets full, and before the block when less than ``needed_bytes`` are free.
    """
    aside = path.with_name(f"tmp_{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    check_space(what, path.parent, needed_bytes)
    with removed_on_error(aside), space_for(what, path.parent, needed_bytes):
        aside.mkdir(parents=True)
        yield aside
    shutil.rmtree(path, ignore_errors=True)
    aside.rename(path)


def give_usual_mode(path: Path) -> None:
    """Give a file or directory the permissions that the umask leaves to new files.

    Libraries that write a temporary file first, such as safetensors, leave it readable by its owner only.
    """
    path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())


def _umask() -> int:
    """Return the umask of this process.

    os.umask can only be asked by changing it for a moment, in which another thread may make a file.
    """
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    line = next(line for line in status.splitlines() if line.startswith("Umask:"))
    return int(line.split()[1], 8)


@contextmanager
def removed_on_error(directory: Path) -> Iterator[None]:
    """Run the ``with`` block, which works in ``directory``, and remove the directory when the block raises.

    Use ``space_for`` inside this block: the removal frees space and so hides that the disk was full.
    """
    try:
        yield
    except BaseException:
        shutil.rmtree(directory, ignore_errors=True)
        raise


def _free_bytes(directory: Path) -> int:
    """Return the free bytes on the disk of ``directory``, or of the nearest parent that exists."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    return shutil.disk_usage(existing).free
