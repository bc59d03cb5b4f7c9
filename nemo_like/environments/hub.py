"""Environments from packages that have many of them: Gymnasium, TextArena, OpenEnv and verifiers.

A package runs in its own process, with its own interpreter if its requirements conflict with those of this
project (``options.python``). An episode stays in that process between its turns; the ``state`` that travels
with the conversation is only the episode's name. A process that does not have the episode plays it again from
its history. ``hubs/hub_main.py`` is the main module of that process.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_like.child_process import child_side
from nemo_like.child_process.parent_side import CallRaised, Child, ChildDied, ChildFailed
from nemo_like.environments.interface import Failure, FailureKind, Feedback, Turn
from nemo_like.environments.shared_options import EPISODE_KEY, HubOptions


class HubEnvironment:
    """Plays the episodes of one hub side by side."""

    def __init__(self, options: HubOptions) -> None:
        """Start the package's process. Raises HubRefused when it cannot be loaded or refuses its options."""
        self._process = HubProcess(options)

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order."""
        return list(await asyncio.gather(*(self._played(turn) for turn in turns)))

    async def _played(self, turn: Turn) -> Feedback:
        episode = turn.state or uuid.uuid4().hex
        try:
            outcome = await self._process.call(
                "step",
                episode=episode,
                data=turn.data[EPISODE_KEY],
                history=[(one.response, one.observation) for one in turn.history],
                response=turn.response,
                is_last=turn.is_last,
            )
        except HubCallFailed as error:
            return Feedback(failure=error.failure)
        except ChildDied:
            # The environment's server replaces this process too, and asks about each turn alone, and so finds
            # the turn that ended the package.
            os._exit(1)
        return Feedback(
            outcome["rewards"],
            observation=outcome["observation"],
            is_done=outcome["is_done"],
            metrics=outcome["metrics"],
            state=episode,
        )


_MAIN = Path(__file__).with_name("hubs") / "hub_main.py"
_TIMEOUT_S = 600.0  # for the start, and for making all prompts of a source


class HubRefused(RuntimeError):
    """The package could not be loaded, or refused its options; the message says why."""


class HubCallFailed(Exception):
    """A call failed; ``failure`` says why the sample has no reward."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


def listed_prompts(options: HubOptions, size: int, seed: int) -> list[dict[str, Any]]:
    """Return the prompts that a hub makes, each with prompt, answer and data; start and end a process for
    this.

    Raises ValueError when the package cannot make them.
    """
    try:
        with closing(HubProcess(options, stderr=subprocess.PIPE)) as process:
            arguments = {"size": size, "seed": seed}
            return _outcome(process.child.call("prompts", arguments, timeout_s=_TIMEOUT_S).result())
    except (HubRefused, HubCallFailed, ChildFailed) as error:
        raise ValueError(str(error)) from error


class HubProcess:
    """A hub's process, and the calls that wait for its answers."""

    def __init__(self, options: HubOptions, stderr: int | None = None) -> None:
        """Start the process and wait until the package has accepted its options. Raises HubRefused."""
        command = [sys.executable if options.python is None else options.python, str(_MAIN)]
        own = {name: value for name, value in asdict(options).items() if name != "python"}
        try:
            self.child = Child(command, _environment(), codec=child_side.JSON, stderr=stderr)
        except OSError as error:
            raise HubRefused(f"{options.python} could not be started: {error}") from error
        try:
            self.child.call(options.adapter, own, timeout_s=_TIMEOUT_S).result()
        except ChildFailed as error:
            self.child.kill()
            raise HubRefused(str(error)) from error

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of ``HubHost`` and return its result. Raises HubCallFailed and ChildDied."""
        try:
            # The environment's server keeps the deadline.
            return _outcome(await self.child.call(method, arguments, timeout_s=None).returned())
        except CallRaised as error:
            raise HubCallFailed(Failure(FailureKind.raised, str(error))) from error

    def close(self) -> None:
        """End the process."""
        self.child.close()


def _outcome(answer: dict[str, Any]) -> Any:
    if (failed := answer.get("failed")) is not None:
        raise HubCallFailed(Failure(FailureKind[failed["kind"]], failed["reason"]))
    return answer["result"]


def _environment() -> dict[str, str]:
    """Return the environment variables of the hub's process. PYTHONPATH has the folder of ``child_side`` and
    the user's own folders, but not this interpreter's packages, which another interpreter must not see."""
    own = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    places = [path or os.getcwd() for path in sys.path]
    kept = [path for path in places if os.path.isdir(path) and not any(_within(path, one) for one in own)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(child_side.__file__).parent), *kept])}


def _within(path: str, directory: str) -> bool:
    return Path(path).resolve().is_relative_to(Path(directory).resolve())
