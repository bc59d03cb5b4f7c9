"""Environments of hubs' packages for tests: real ones, played through the environment's own process."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from nemo_like.cluster.runtime import free_port
from nemo_like.data.interface import TaskPrompt
from nemo_like.environments.environment_data import EnvironmentPrompts
from nemo_like.environments.interface import Exchange, Feedback, Turn
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.server import EnvironmentServer
from tests.functional.runs import ROOT
from tests.unit.data.test_mixture import source
from tests.unit.environments.configs import env_config

PYTHON = str(ROOT / ".venv-hubs" / "bin" / "python")


def hub_config(kind: str, max_turns: int = 16, **options: Any) -> EnvConfig:
    return replace(
        env_config(kind, options={"python": PYTHON, **options}, timeout_s=120.0), max_turns=max_turns
    )


def problems(cfg: EnvConfig, size: int, seed: int = 0) -> list[TaskPrompt]:
    """What ``data.train.kind=environment`` gives."""
    of_game = source(env="game", options={"size": size, "seed": seed})
    made = EnvironmentPrompts({"game": cfg}).prompts(of_game, "train")
    return [made[index] for index in range(len(made))]


def turn(
    example: TaskPrompt, response: str, history: tuple[Exchange, ...], state: Any, is_last: bool
) -> Turn:
    return Turn(
        prompt=example.prompt,
        response=response,
        answer=example.answer,
        is_truncated=False,
        data=example.data,
        history=history,
        is_last=is_last,
        state=state,
    )


def played(
    cfg: EnvConfig,
    example: TaskPrompt,
    policy: Callable[[str], str],
    between: Callable[[EnvironmentServer], Any] | None = None,
) -> list[Feedback]:
    """Play an episode: ``policy`` answers what it sees. ``between`` is awaited after the first turn."""

    async def play() -> list[Feedback]:
        server = EnvironmentServer("game", cfg)
        await server.start()
        history: list[Exchange] = []
        feedback: list[Feedback] = []
        shown, state = str(example.prompt), None
        try:
            for number in range(1, cfg.max_turns + 1):
                response = policy(shown)
                asked = turn(example, response, tuple(history), state, number == cfg.max_turns)
                (answer,) = await server.step([asked])
                feedback.append(answer)
                if answer.is_done or answer.failure is not None:
                    break
                shown, state = str(answer.observation), answer.state
                history.append(Exchange(response, shown))
                if number == 1 and between is not None:
                    await between(server)
            return feedback
        finally:
            await server.close()

    return asyncio.run(play())


def total(feedback: list[Feedback]) -> float:
    assert [one.failure for one in feedback] == [None] * len(feedback)
    return sum(sum(one.rewards.values()) for one in feedback)


def hanoi(shown: str) -> str:
    """The next move that solves a tower of Hanoi, for the board that is shown last."""
    towers = {
        name: [int(one) for one in disks.split(",") if one.strip()]
        for name, disks in _TOWER.findall(shown)[-3:]
    }
    return "[{} {}]".format(*next(_moves(towers, max(map(max, filter(None, towers.values()))), "C")))


_TOWER = re.compile(r"([ABC]): \[([\d, ]*)\]")


def _moves(towers: dict[str, list[int]], disk: int, goal: str) -> Iterator[tuple[str, str]]:
    """Yield the first moves that bring ``disk`` and all smaller ones to ``goal``."""
    if disk == 0:
        return
    there = next(name for name, disks in towers.items() if disk in disks)
    if there == goal:
        yield from _moves(towers, disk - 1, goal)
        return
    spare = next(name for name in towers if name not in (there, goal))
    yield from _moves(towers, disk - 1, spare)
    yield there, goal


@contextmanager
def echo_server(directory: Path) -> Iterator[str]:
    """Serve the environment that ``openenv init`` makes; yield its address."""
    subprocess.run(
        [PYTHON, "-m", "openenv.cli", "init", "parrot", "-o", str(directory)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    app = next(directory.rglob("app.py"))
    app.write_text(app.read_text().replace("max_concurrent_envs=1,", "max_concurrent_envs=8,"))
    port = free_port()
    command = [PYTHON, "-m", "uvicorn", "server.app:app", "--host", "127.0.0.1", "--port", str(port)]
    with (directory / "server.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=app.parents[1], stdout=log, stderr=subprocess.STDOUT)
    try:
        _wait_until_up(process, f"http://127.0.0.1:{port}/health", directory / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=30)


def _wait_until_up(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.TransportError):
            if httpx.get(url, timeout=5).is_success:
                return
        time.sleep(0.2)
    raise AssertionError(f"the server did not start:\n{log.read_text()[-3000:]}")


MCP_SERVER = [sys.executable, str(ROOT / "tests" / "functional" / "mcp_calculator.py")]
