"""Environments for tests, by import path: they misbehave for the turns whose response says so."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import time

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


class Forgetful:
    """Answers only the first turn."""

    async def step(self, turns):
        return [Feedback({"score": 1.0})]


class Unbuildable:
    def __init__(self):
        raise OSError("no licence file")


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
