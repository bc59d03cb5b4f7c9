"""The journal of a run: the order of events that another run would have in another order.

    rollouts begin, groups end, steps are over ──▶ RUN_DIR/journal/after-N/driver.jsonl
    an engine's requests and weights           ──▶ RUN_DIR/journal/after-N/engine-I.jsonl

Metrics depend on timing when groups are accumulated in the order in which they end (grpo.overlap=exact), and
when weights come while samples are under way (grpo.max_staleness above 0). A run that follows a journal keeps
its order of events, and so has its metrics to the bit.

A journal has a stretch for each moment without rollouts under way: the start, and every checkpoint by
``checkpointing.save_period``. A run that continues from a checkpoint follows the stretch that its earlier
process began there. An engine's file is described in ``generation.engine_journal``; the driver's has lines:

    {"event": "start", "settings": {...}}
    {"event": "begin", "rollout": "training/5/0", "version": 3, "prompts": [17, 4, ...]}
    {"event": "part", "rollout": "training/4/0", "groups": [0, 2]}          positions among the prompts
    {"event": "trained", "step": 4}
    {"event": "abandoned", "work": "step 5"}                                a process died, and it began again
"""

from __future__ import annotations

import json
import shutil
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_like.configuration import Config
from nemo_like.driver.run_failures import RunFailed
from nemo_like.observability.disk import space_for
from nemo_like.plan.derived import depends_on_timing
from nemo_like.rollout.options import JOURNAL_FOLDER
from nemo_like.rollout.prompts import PromptBatch, WantedGroups

_DRIVER_FILE = "driver.jsonl"
_DATA = "the digests of data.train"  # in a journal's settings
# The beginnings of the lines that count in ``_length``.
_OF_ROLLOUTS = tuple(f'{{"event": "{event}"' for event in ("begin", "part", "trained"))


@dataclass(frozen=True, slots=True)
class Stretch:
    """Where the processes of a run write a stretch of its journal, and which stretch they follow, if any."""

    path: Path
    followed: Path | None


@dataclass(slots=True)
class _Followed:
    """The events of a followed stretch that are still to come, by the rollouts' names."""

    path: Path | None = None
    begun: dict[str, tuple[int, list[int]]] = field(default_factory=dict)
    parts: dict[str, deque[tuple[int, ...]]] = field(default_factory=dict)
    abandoned: str | None = None  # the work that was repeated because a process died


class RunJournal:
    """Writes the journal of one run, and follows the journal of another run or of an earlier process of its
    own."""

    def __init__(
        self,
        cfg: Config,
        directory: Path,
        open_engines: Callable[[Stretch], None],
        note: Callable[[str], None],
        data: Sequence[str],
    ) -> None:
        """Write below ``directory``; nothing is written before ``begin_stretch``.

        ``open_engines`` has all engines write, and follow, the files of a stretch; ``note`` gets a sentence
        for people; ``data`` are the digests of the training sources, whose prompts a journal names by number.
        ``is_on`` says whether there is a journal: it is false where metrics do not depend on timing, and with
        ``rollout.journal=false``.
        """
        self._settings = {**_settings(cfg), _DATA: list(data)}
        self._directory, self._open_engines, self._note = directory, open_engines, note
        self._other = None if cfg.rollout.follow_journal is None else Path(cfg.rollout.follow_journal)
        self.is_on = depends_on_timing(cfg) and (cfg.rollout.journal or self._other is not None)
        self._followed = _Followed()
        self._is_on_course = True  # every event so far was in the followed journal
        self._path: Path | None = None

    def begin_stretch(self, after_step: int) -> None:
        """Begin the stretch after ``after_step``. No rollout may be under way, and engines must have the
        weights of that step.

        Raises RunFailed when the stretch to follow cannot be read, or comes from a run with other settings.
        """
        path = self._directory / stretch_name(after_step)
        source = self._set_aside(path)
        if self._other is not None:
            source = self._other / JOURNAL_FOLDER / path.name
        self._followed = _Followed() if source is None else self._read(source)
        if self._followed.abandoned is not None:
            self._refuse_abandoned(self._followed)
            self._followed = _Followed()
        path.mkdir(parents=True)
        self._path = path / _DRIVER_FILE
        self._write({"event": "start", "settings": self._settings})
        self._open_engines(Stretch(path, self._followed.path))

    def begun(self, prompts: PromptBatch) -> None:
        """Write that a rollout begins. Raises RunFailed when the followed journal began it with another
        version or other prompts."""
        followed = self._followed.begun.pop(prompts.name, None)
        self._is_on_course &= followed is not None
        own = (prompts.policy_version, list(prompts.indices))
        if followed is not None and followed != own:
            raise RunFailed(
                f"{self._followed.path}: the rollout {prompts.name} began with policy version {followed[0]} "
                f"and the prompts {followed[1][:4]}..., and in this run with {own[0]} and {own[1][:4]}...; "
                "follow a journal with the configuration and the data of its run"
            )
        self._write(
            {"event": "begin", "rollout": prompts.name, "version": own[0], "prompts": own[1]},
        )

    def wanted(self, prompts: PromptBatch, at_least: int) -> WantedGroups:
        """Return the next part of a rollout: the followed journal's, or else any ``at_least`` groups."""
        parts = self._followed.parts.get(prompts.name)
        self._is_on_course &= bool(parts)
        return WantedGroups(at_least, parts.popleft() if parts else ())

    def took(self, prompts: PromptBatch, positions: Sequence[int]) -> None:
        """Write which groups a part had, by their positions among the prompts."""
        self._write({"event": "part", "rollout": prompts.name, "groups": list(positions)})

    def trained(self, step: int) -> None:
        """Write that a step is over."""
        self._write({"event": "trained", "step": step})

    def abandoned(self, work: str) -> None:
        """Write that all work under way is abandoned and ``work``, such as "step 5", begins again."""
        self._followed = _Followed()
        self._write({"event": "abandoned", "work": work})

    def _set_aside(self, path: Path) -> Path | None:
        """Rename the stretch that an earlier process of this run wrote, and return it; None when there is
        none to follow.

        A stretch without rollouts is not followed, and may lack files. Of two stretches the longer one is
        kept: a process that was killed while it followed the other had not come as far. A run that has left a
        followed journal in an earlier stretch follows none, since it would be of other weights.
        """
        earlier = path.with_name(f"{path.name}.earlier")
        if path.exists():
            longer, shorter = (earlier, path) if _length(earlier) >= _length(path) else (path, earlier)
            shutil.rmtree(shorter, ignore_errors=True)
            if longer is path:
                path.rename(earlier)
        return earlier if self._is_on_course and _length(earlier) else None

    def _read(self, path: Path) -> _Followed:
        try:
            lines = (path / _DRIVER_FILE).read_text(encoding="utf-8").splitlines(keepends=True)
            # A kill may have cut the last line short.
            events = [json.loads(line) for line in lines if line.endswith("\n")]
            return self._followed_of(path, events)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise RunFailed(
                f"the journal {path} cannot be followed: {type(error).__name__}: {error}; "
                "rollout.follow_journal needs a run with the same checkpointing.save_period; without a "
                "journal that can be read, leave it out, and have a run continue with rollout.journal=false"
            ) from error

    def _followed_of(self, path: Path, events: Sequence[Mapping[str, Any]]) -> _Followed:
        if not events or events[0]["event"] != "start":
            raise ValueError("its first line is no start")
        theirs = {_DATA: self._settings[_DATA], **events[0]["settings"]}  # older journals do not name theirs
        if other := [
            key for key in {**self._settings, **theirs} if self._settings.get(key) != theirs.get(key)
        ]:
            differences = ", ".join(
                f"{key}={theirs.get(key)}, here {self._settings.get(key)}" for key in other
            )
            raise ValueError(f"its run had {differences}")
        followed = _Followed(path)
        for event in events[1:]:
            match event["event"]:
                case "begin":
                    followed.begun[event["rollout"]] = (event["version"], event["prompts"])
                case "part":
                    followed.parts.setdefault(event["rollout"], deque()).append(tuple(event["groups"]))
                case "abandoned":
                    followed.abandoned = event["work"]
        return followed

    def _refuse_abandoned(self, followed: _Followed) -> None:
        """Raise RunFailed for a stretch of another run that cannot be followed; only note it for a stretch of
        this run."""
        reason = (
            f"a process died in {followed.abandoned} of the run that wrote the journal {followed.path}, so "
            "samples began again there with other weights, and nobody can follow it"
        )
        if self._other is not None:
            raise RunFailed(f"{reason}; follow a run without such a death")
        self._note(f"{reason}: from here on this run goes its own way")

    def _write(self, event: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        line = json.dumps(event) + "\n"
        with space_for("the run's journal", self._path.parent, len(line)), self._path.open("a") as file:
            file.write(line)


def _length(stretch: Path) -> int:
    """Return how many rollouts, parts and steps a stretch has; 0 when there is no such stretch."""
    try:
        lines = (stretch / _DRIVER_FILE).read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return 0
    return sum(line.startswith(_OF_ROLLOUTS) for line in lines)


def stretch_name(after_step: int) -> str:
    """Return the directory name of the stretch that begins after this step."""
    return f"after-{after_step:05d}"


def _settings(cfg: Config) -> dict[str, Any]:
    """Return the keys on which the order of events depends, besides keys of engines."""
    grpo = cfg.grpo
    return {
        **{f"grpo.{name}": value for name, value in grpo.step_shape.by_key.items()},
        "grpo.overlap": grpo.overlap.value,
        "grpo.max_staleness": grpo.max_staleness,
        "grpo.weight_updates": grpo.weight_updates.value,
        "grpo.seed": grpo.seed,
        "rollout.max_tokens_per_step": cfg.rollout.max_tokens_per_step,
        "policy.data_parallel_size": cfg.policy.data_parallel_size,
        "generation.num_engines": cfg.generation.num_engines,
    }
