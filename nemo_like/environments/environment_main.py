"""The main function of the child process that runs an environment; its calls interleave on one event loop.

    stdin    EnvConfig, then (call id, turns) again and again
    stdout   Ready or Refused, then (call id, feedback or CallRaised) as each call ends

The process ends when its stdin does, as when its parent ends, and with it everything that the environment
started. What a conversation keeps between turns (``state``) leaves the process as a pickle and comes back as
one, so that other processes need not be able to load it.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, BinaryIO

from nemo_like.batch.columns import Column, Layout
from nemo_like.environments.feedback import checked
from nemo_like.environments.frames import LENGTH_BYTES, CallRaised, Ready, Refused, frame
from nemo_like.environments.guardian import run_guarded
from nemo_like.environments.interface import Environment, Feedback, Turn
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import build_environment, written_columns
from nemo_like.observability.printable import accept_all_characters

# References to tasks that nobody awaits, so that they are not garbage-collected while they run.
_running: set[asyncio.Task[None]] = set()


def main() -> None:
    run_guarded()
    # Frames move to descriptors of their own, which no program that a reward starts inherits. Then stdin is
    # empty, and what rewards print goes to stderr and so to the log.
    calls, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    accept_all_characters()
    cfg: EnvConfig = _read(calls)
    try:
        environment = build_environment(cfg)
        columns = written_columns(environment)
    except Exception as error:
        traceback.print_exc()
        _write(answers, Refused(f"{type(error).__name__}: {error}"))
        return
    _write(answers, Ready(columns))
    try:
        asyncio.run(_serve(environment, columns, calls, answers))
    except SystemExit as ended:
        # Exit at once: an orderly exit would close ``calls``, whose lock the reading thread holds, and abort.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(ended.code if isinstance(ended.code, int) else 1)


async def _serve(
    environment: Environment, columns: Sequence[Column], calls: BinaryIO, answers: BinaryIO
) -> None:
    loop, waiting = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Sequence[Turn]]]()

    def read() -> None:
        while (call := _read(calls)) is not None:
            loop.call_soon_threadsafe(waiting.put_nowait, call)
        # The parent is gone: exit at once, even if a call blocks the loop.
        os._exit(0)

    threading.Thread(target=read, name="calls", daemon=True).start()
    while True:
        call_id, turns = await waiting.get()
        task = loop.create_task(_answer(environment, columns, call_id, turns, answers))
        _running.add(task)
        task.add_done_callback(_running.discard)


async def _answer(
    environment: Environment,
    columns: Sequence[Column],
    call_id: int,
    turns: Sequence[Turn],
    answers: BinaryIO,
) -> None:
    try:
        given = list(await environment.step([_with_state(turn) for turn in turns]))
        if len(given) != len(turns):
            raise ValueError(f"the environment gave {len(given)} answers to {len(turns)} turns")
        plain = [
            checked(answer, columns, len(turn.response_ids))
            for answer, turn in zip(given, turns, strict=True)
        ]
        message = frame((call_id, [_with_pickled_state(feedback) for feedback in plain]))
        if any(column.layout is Layout.objects for column in columns):
            pickle.loads(message[LENGTH_BYTES:])  # some objects can be pickled but not unpickled: fail here
    except Exception as error:
        traceback.print_exc()
        message = frame((call_id, CallRaised(f"{type(error).__name__}: {error}")))
    answers.write(message)
    answers.flush()


def _with_state(turn: Turn) -> Turn:
    return turn if turn.state is None else replace(turn, state=pickle.loads(turn.state))


def _with_pickled_state(feedback: Feedback) -> Feedback:
    return feedback if feedback.state is None else replace(feedback, state=pickle.dumps(feedback.state))


def _read(stream: BinaryIO) -> Any:
    """Read the next frame; return None at the end of the stream."""
    header = stream.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    return pickle.loads(stream.read(int.from_bytes(header, "big")))


def _write(stream: BinaryIO, content: Any) -> None:
    stream.write(frame(content))
    stream.flush()


if __name__ == "__main__":
    main()
