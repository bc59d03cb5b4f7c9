"""The child process that runs an environment: frames on stdin and stdout, calls interleave on one event loop.

    in    EnvConfig, then (call id, turns) again and again
    out   Ready or Refused, then (call id, feedback or Raised) as each call ends

It ends with its parent: when stdin does.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, BinaryIO

from nemo_like.config.schema import EnvConfig
from nemo_like.environments.frames import LENGTH_BYTES, Raised, Ready, Refused, frame
from nemo_like.environments.interface import Environment, Turn
from nemo_like.environments.registry import build_environment

# Keeps what is awaited by nobody from being collected.
_running: set[asyncio.Task[None]] = set()


def main() -> None:
    # What rewards print goes to the log with stderr; stdout carries frames alone.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    cfg: EnvConfig = _read(sys.stdin.buffer)
    try:
        environment = build_environment(cfg)
    except Exception as error:
        traceback.print_exc()
        _write(answers, Refused(f"{type(error).__name__}: {error}"))
        return
    _write(answers, Ready())
    try:
        asyncio.run(_serve(environment, answers))
    except SystemExit as ended:
        # At once: an orderly end would close stdin, which the thread that reads it holds, and abort.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 1)


async def _serve(environment: Environment, answers: BinaryIO) -> None:
    loop, calls = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Sequence[Turn]]]()

    def read() -> None:
        while (call := _read(sys.stdin.buffer)) is not None:
            loop.call_soon_threadsafe(calls.put_nowait, call)
        # At once, also when a call blocks the loop.
        os._exit(0)

    threading.Thread(target=read, name="calls", daemon=True).start()
    while True:
        call_id, turns = await calls.get()
        task = loop.create_task(_answer(environment, call_id, turns, answers))
        _running.add(task)
        task.add_done_callback(_running.discard)


async def _answer(environment: Environment, call_id: int, turns: Sequence[Turn], answers: BinaryIO) -> None:
    try:
        feedback = list(await environment.step(turns))
        if len(feedback) != len(turns):
            raise ValueError(f"the environment gave {len(feedback)} answers to {len(turns)} turns")
        message = frame((call_id, feedback))
    except Exception as error:
        traceback.print_exc()
        message = frame((call_id, Raised(f"{type(error).__name__}: {error}")))
    answers.write(message)
    answers.flush()


def _read(stream: BinaryIO) -> Any:
    """The next frame; None at the end."""
    header = stream.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    return pickle.loads(stream.read(int.from_bytes(header, "big")))


def _write(stream: BinaryIO, content: Any) -> None:
    stream.write(frame(content))
    stream.flush()


if __name__ == "__main__":
    main()
