"""The journal of an engine: which requests and weights it took, and at which steps. Standard library only.

An engine's results depend on its requests, on its weights, and on the step at which each of these takes
effect: that decides which requests a step computes together, and which token of a sample is the first of new
weights. A journal records all of this, one JSON object per line:

    {"event": "start", "engine": "engine-0", "settings": {...}}        first; a replay needs the same settings
    {"step": 0, "event": "add", "requests": [["3/0", 2774538121]]}     in their order, each with its digest
    {"step": 9, "event": "abort", "requests": ["3/0"]}
    {"step": 9, "event": "weights", "version": 4, "running": ["3/1"]}
    {"step": 14, "event": "mixed", "request": "3/1", "versions": [[[3, 0], [4, 7]]]}
    {"step": 20, "event": "ran"}                                       when it was flushed

``step`` is the number of engine steps that had run since the journal began. "mixed" is for people, and a
replay ignores it: for each response of a finished group it lists the versions, each with its first token.
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


class JournalError(ValueError):
    """A journal cannot be read, or a replay has come to differ from it; the message names file and line."""


@dataclass(frozen=True, slots=True)
class RequestsAdded:
    """These requests entered the engine, in this order; ``requests`` has their ids and digests."""

    step: int
    requests: tuple[tuple[str, int], ...]
    line: int


@dataclass(frozen=True, slots=True)
class RequestsAborted:
    """These requests were aborted: they left the engine unfinished, or never entered it."""

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
    """``step`` steps had run when the journal was flushed; since the last event only steps had run."""

    step: int
    line: int


JournalEvent = RequestsAdded | RequestsAborted | WeightsTaken | StepsRan


def journal_settings(
    vllm_version: str,
    generation: GenerationConfig,
    weight_updates: WeightUpdates,
    others: Mapping[str, int | str],
) -> dict[str, Any]:
    """Return the settings that must be equal in an engine that writes a journal and in an engine that replays
    it. ``others`` are settings from outside the group ``generation``."""
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
    """Writes a journal. Events reach the file at ``flush``, which ``took_weights`` calls too."""

    def __init__(self, path: Path, engine: str, settings: Mapping[str, Any]) -> None:
        """Make the file, and the folders above it.

        Raises FileExistsError when the file exists already, DiskFull or OSError when it cannot be written.
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
        """Write that ``step`` steps have run, so a replay runs up to there without waiting for an event."""
        if step > self._last_step:
            self._write({"step": step, "event": "ran"})

    def finished_mixed(
        self, step: int, request_id: str, versions: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """Write for each response of a group its policy versions, each with the index of its first token."""
        spans = [[list(span) for span in response] for response in versions]
        self._write({"step": step, "event": "mixed", "request": request_id, "versions": spans})

    def flush(self) -> None:
        """Bring all events to the file. Raises DiskFull or OSError."""
        lines = "".join(self._unwritten).encode()
        with space_for("an engine's journal", self._path.parent, len(lines)):
            self._append(lines)
        self._unwritten.clear()

    def _append(self, lines: bytes) -> None:
        """Append the lines; on failure restore the file and raise OSError."""
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
    """A journal as ``read_journal`` returns it."""

    path: Path
    settings: Mapping[str, Any]
    events: tuple[JournalEvent, ...]

    def check_settings(self, settings: Mapping[str, Any]) -> None:
        """Raise JournalError unless ``settings`` equal the settings in the journal."""
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

    Raises JournalError for a file that is no journal, and OSError when the file cannot be read.
    """
    # Bytes that are no UTF-8 become a character that no number and no name has, so they are refused below.
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


# Each function takes the JSON object of a line, and the line's number.
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
    """Return the event of a line; None for a "mixed" event, which no replay needs."""
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
