"""Environments for tests, by import path: they misbehave for the turns whose response says so."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np

from nemo_like.batch.columns import Column, Layout, writes
from nemo_like.environments.interface import Feedback

HOUR_S = 3600.0


class Misbehaving:
    def __init__(self, score=1.0):
        self._score = score

    async def step(self, turns):
        return [await self._judge(turn.response) for turn in turns]

    async def _judge(self, response):
        match response:
            case "raise":
                raise KeyError("no such answer")
            case "wait":
                await asyncio.sleep(HOUR_S)
            case "block":
                time.sleep(HOUR_S)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.exit(3)
            case "print":
                print("noise on standard output")
        return Feedback({"score": {"nan": math.nan, "inf": math.inf}.get(response, self._score)})


class Malformed:
    """Gives what no ``Feedback`` may be, where the response names it."""

    async def step(self, turns):
        return [self._answer(turn) for turn in turns]

    def _answer(self, turn):
        match turn.response:
            case "no feedback":
                return 1.0
            case "none":
                return Feedback({"a": None})
            case "metric":
                return Feedback({"a": 1.0}, metrics={"seen": "twice"})
            case "unpicklable":
                return Feedback(observation="go on", is_done=False, state=lambda: None)
            case "unreadable":
                return Feedback(observation="go on", is_done=False, state=Unreadable())
            case "surrogate":
                return Feedback(observation=chr(0xDC80), is_done=False)
            case "numpy":
                return Feedback({"a": np.float32(0.5)}, is_done=np.bool_(True))
        return Feedback({"a": 1.0, "of_state": float(turn.state is not None)})


class Unreadable:
    """Can be pickled, and not read again."""

    def __reduce__(self):
        return int, ("not a number",)


class Parental:
    """Starts a process that leads a session of its own, or one whose parent is gone as well."""

    async def step(self, turns):
        return [self._answer(turn.response) for turn in turns]

    def _answer(self, response):
        sleeping = f"exec sleep {HOUR_S:g}"
        match response:
            case "session":
                child = subprocess.Popen(["sh", "-c", sleeping], start_new_session=True)
                return Feedback({"pid": child.pid})
            case "orphan":
                # The shell in between ends at once.
                command = ["sh", "-c", f"setsid sh -c '{sleeping}' >/dev/null & echo $!"]
                started = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                return Feedback({"pid": int(started.stdout)})
            case "read":
                return Feedback({"read": len(sys.stdin.read())})
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        return Feedback({"score": 1.0})


class Forgetful:
    """Answers only the first turn."""

    async def step(self, turns):
        return [Feedback({"score": 1.0})]


class Unbuildable:
    def __init__(self):
        raise OSError("no licence file")


def mostly_failing(turn):
    """Judges right answers alone."""
    if turn.response != turn.answer:
        raise KeyError("no such answer")
    return 1.0


def reward(turn):
    """A reward function that does what the problem's mood says."""
    match turn.data["mood"]:
        case "hang":
            time.sleep(HOUR_S)
        case "raise":
            raise KeyError("no such answer")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "nan":
            return math.nan
    return float(turn.response == turn.answer)


@writes(Column("notes", "", Layout.objects), Column("credit", "float32", Layout.per_token))
class Columns:
    """Brings what cannot travel, or does not fit, where the response says so."""

    async def step(self, turns):
        return [Feedback({"a": 1.0}, columns=self._columns(turn)) for turn in turns]

    def _columns(self, turn):
        match turn.response:
            case "unreadable":
                return {"notes": Unreadable()}
            case "undeclared":
                return {"other": 1.0}
            case "too long":
                return {"credit": [1.0] * (len(turn.response_ids) + 1)}
        return {"notes": [turn.response], "credit": [0.5] * len(turn.response_ids)}
