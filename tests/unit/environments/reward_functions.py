"""Reward functions of users, by import path."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from nemo_like.environments.interface import Turn


def python_number(turn: Turn) -> float:
    return float(turn.response == turn.answer)


def numpy_number(turn: Turn) -> np.float32:
    return np.float32(turn.response == turn.answer)


def numpy_bool(turn: Turn) -> np.bool_:
    return np.bool_(turn.response == turn.answer)


def zero_dimensional(turn: Turn) -> np.ndarray:
    return np.array(turn.response == turn.answer, dtype=np.float64)


def named(turn: Turn) -> Mapping[str, np.int64]:
    return {"reward": np.int64(turn.response == turn.answer)}


async def awaited(turn: Turn) -> np.float16:
    return np.float16(turn.response == turn.answer)


def raising(turn: Turn) -> float:
    raise KeyError("no such answer")


def forgetful(turn: Turn) -> None:
    """Returns nothing."""
