"""The journal of an engine: what entered it and left it, and at which of its steps. Standard library only.

An engine's results depend on its requests, on its weights, and on the step at which each of these takes
effect: on what a step computes together, and on which token of a sample is the first of new weights. A
journal has all of that, one JSON object per line:

    {"event": "start", "engine": "engine-0", "settings": {...}}        first, what must be alike in a replay
    {"step": 0, "event": "add", "requests": [["3/0", 2774538121]]}     in their order, each with its digest
    {"step": 9, "event": "abort", "requests": ["3/0"]}
    {"step": 9, "event": "weights", "version": 4, "running": ["3/1"]}
    {"step": 14, "event": "mixed", "request": "3/1", "versions": [[[3, 0], [4, 7]]]}
    {"step": 20, "event": "ran"}                                       when it was flushed

``step`` counts the engine's steps that had run before in this journal. "mixed" is for people: it says of each
response of a finished group at which of its tokens which version began. A replay needs only the others.
"""

from __future__ import annotations

import json
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_like.observability.disk import space_for

if TYPE_CHECKING:
    from nemo_like.algorithms.options import WeightUpdates
    from nemo_like.generation.interface import GroupRequest
    from nemo_like.generation.options import GenerationConfig
    from nemo_like.generation.sampling import SamplingSettings


@dataclass(frozen=True, slots=True)
class EngineJournal:
    """The files of a stretch of an engine's work: the one that it writes, and one whose events it repeats
    first. A stretch begins where the engine has no requests."""

    path: str
    replayed: str | None = None


class JournalError(ValueError):
    """A journal cannot be read, or does not fit what happens; the message names file, line and event."""


@dataclass(frozen=True, slots=True)
class RequestsAdded:
    """These requests entered the engine, in this order. ``requests`` has the digest of each."""

    step: int
    requests: tuple[tuple[str, int], ...]
    line: int


@dataclass(frozen=True, slots=True)
class RequestsAborted:
    """These requests left the engine unfinished, or did not enter it at all."""

    step: int
    request_ids: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class WeightsTaken:
    """The engine took the weights of ``version``."""

    step: int
    version: int
    line: int


@dataclass(frozen=True, slots=True)
class StepsRan:
    """So many steps had run when the journal was flushed, and nothing else had happened."""

    step: int
    line: int


JournalEvent = RequestsAdded | RequestsAborted | WeightsTaken | StepsRan


def journal_settings(
    vllm_version: str,
    generation: GenerationConfig,
    weight_updates: WeightUpdates,
    others: Mapping[str, int | str],
) -> dict[str, Any]:
    """Return what must be alike in an engine that writes a journal and one that replays it; ``others`` is
    what the configuration of generation does not say."""
    vllm_cfg = {name: getattr(value, "value", value) for name, value in asdict(generation.vllm_cfg).items()}
    return {
        "vllm": vllm_version,
        **others,
        "weight_updates": weight_updates.value,
        "kv_cache_after_update": generation.kv_cache_after_update.value,
        **vllm_cfg,
        # Journals from before there were such arguments name none.
        **({"vllm_kwargs": dict(generation.vllm_kwargs)} if generation.vllm_kwargs else {}),
    }


def request_digest(request: GroupRequest, sampling: SamplingSettings) -> int:
    """Return a digest of everything on which a request's responses depend besides the weights."""
    digest = zlib.crc32(array("q", request.prompt_ids).tobytes())
    for image in request.images:
        digest = zlib.crc32(image, digest)
    seeds = (request.seeds[0], len(request.seeds))
    return zlib.crc32(repr((seeds, sampling)).encode(), digest)


class JournalWriter:
    """Writes a journal. Events reach the file with ``flush``, which new weights imply."""

    def __init__(self, path: Path, engine: str, settings: Mapping[str, Any]) -> None:
        """Make the file, and the folders above it.

        Raises FileExistsError when it is there already, DiskFull or OSError when it cannot be written.
        """
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("x").close()
        self._unwritten: list[str] = []
        self._last_step = 0
        self._write({"event": "start", "engine": engine, "settings": dict(settings)})
        self.flush()

    def added(self, step: int, requests: Sequence[tuple[str, int]]) -> None:
        self._write({"step": step, "event": "add", "requests": [list(one) for one in requests]})

    def aborted(self, step: int, request_ids: Sequence[str]) -> None:
        self._write({"step": step, "event": "abort", "requests": list(request_ids)})

    def took_weights(self, step: int, version: int, running: Sequence[str]) -> None:
        """Write that the engine took new weights while these requests were running."""
        self._write({"step": step, "event": "weights", "version": version, "running": list(running)})
        self.flush()

    def ran(self, step: int) -> None:
        """Write that ``step`` steps have run: that up to there a replay has no other event to wait for."""
        if step > self._last_step:
            self._write({"step": step, "event": "ran"})

    def finished_mixed(
        self, step: int, request_id: str, versions: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """Write for each response of a group at which of its tokens which version began."""
        spans = [[list(span) for span in response] for response in versions]
        self._write({"step": step, "event": "mixed", "request": request_id, "versions": spans})

    def flush(self) -> None:
        """Bring all events to the file. Raises DiskFull or OSError."""
        lines = "".join(self._unwritten).encode()
        with space_for("an engine's journal", self._path.parent, len(lines)):
            self._append(lines)
        self._unwritten.clear()

    def _append(self, lines: bytes) -> None:
        """Append the lines, or leave the file as it was and raise OSError."""
        with self._path.open("ab", buffering=0) as file:
            size = file.tell()
            try:
                written = 0
                while written < len(lines):
                    written += file.write(lines[written:])
            except OSError:
                file.truncate(size)
                raise

    def _write(self, event: Mapping[str, Any]) -> None:
        self._last_step = event.get("step", 0)
        self._unwritten.append(json.dumps(event) + "\n")


@dataclass(frozen=True, slots=True)
class WrittenJournal:
    """A journal that was read."""

    path: Path
    settings: Mapping[str, Any]
    events: tuple[JournalEvent, ...]

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise JournalError when an engine with these settings would compute otherwise."""
        own = json.loads(json.dumps(dict(settings)))
        names = [name for name in {**own, **self.settings} if own.get(name) != self.settings.get(name)]
        if names:
            raise JournalError(
                f"{self.path}:1: was written by an engine with "
                f"{', '.join(f'{name}={self.settings.get(name)}' for name in names)}, and this one has "
                f"{', '.join(f'{name}={own.get(name)}' for name in names)}; a replay needs the same"
            )


def read_journal(path: Path) -> WrittenJournal:
    """Read a journal. A last line that was cut short, as by a kill, is left out.

    Raises JournalError for a file that is none, OSError when it cannot be read.
    """
    # What is no UTF-8 is replaced by a character that no number and no name has, and so is refused below.
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()
    if not lines:
        raise JournalError(f"{path}: is empty; an engine's journal begins with its start")
    start = _parsed(path, 1, lines[0])
    if start.get("event") != "start" or not isinstance(start.get("settings"), dict):
        raise JournalError(f'{path}:1: is no {{"event": "start", "settings": ...}}, and so no journal')
    events: list[JournalEvent] = []
    for number, line in enumerate(lines[1:], start=2):
        event = _event(path, number, _parsed(path, number, line))
        if event is None:
            continue
        if events and event.step < events[-1].step:
            raise JournalError(
                f"{path}:{number}: is of step {event.step}, after an event of step {events[-1].step}"
            )
        events.append(event)
    return WrittenJournal(path, start["settings"], tuple(events))


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise JournalError(f"{path}:{number}: is no JSON: {error}") from None
    if not isinstance(value, dict):
        raise JournalError(f"{path}:{number}: is no JSON object")
    return value


# Each takes the object of a line and its number.
_READERS: Mapping[str, Callable[[Mapping[str, Any], int], JournalEvent | None]] = {
    "add": lambda one, line: RequestsAdded(
        int(one["step"]), tuple((str(name), int(digest)) for name, digest in one["requests"]), line
    ),
    "abort": lambda one, line: RequestsAborted(int(one["step"]), tuple(map(str, one["requests"])), line),
    "weights": lambda one, line: WeightsTaken(int(one["step"]), int(one["version"]), line),
    "ran": lambda one, line: StepsRan(int(one["step"]), line),
    "mixed": lambda one, line: None,
}


def _event(path: Path, number: int, value: Mapping[str, Any]) -> JournalEvent | None:
    """Return the event of a line; None for one that is for people."""
    reader = _READERS.get(value.get("event", ""))
    if reader is None:
        raise JournalError(
            f"{path}:{number}: has event={value.get('event')!r}; known are {', '.join(_READERS)}"
        )
    try:
        return reader(value, number)
    except (KeyError, TypeError, ValueError) as error:
        raise JournalError(
            f"{path}:{number}: is no {value['event']!r} event: {type(error).__name__}: {error}"
        ) from None
