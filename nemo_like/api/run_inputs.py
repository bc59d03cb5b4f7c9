"""Checks the reward function and the rows that a program gives to a run, and writes them for its other
processes.

    rows      ──▶ RUN_DIR/inputs/train-DIGEST.jsonl, validation-DIGEST.jsonl
    rewards   ──▶ RUN_DIR/inputs/reward-DIGEST.pickle, which holds all functions

The digest in a file's name is of its contents: a run that is continued with other inputs keeps the old files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from nemo_like.config.problems import ConfigError
from nemo_like.data.answers import answer_text
from nemo_like.data.options import DatasetConfig
from nemo_like.data.sources import FILE_READERS
from nemo_like.environments.feedback import as_number
from nemo_like.environments.own_reward import (
    Reward,
    RewardParameters,
    UnfitReward,
    WeightedRewards,
    pickled_reward,
)
from nemo_like.observability.disk import write_whole

Rows = Iterable[Mapping[str, Any]] | str | Path
GivenReward = Callable[..., Any] | list[Callable[..., Any]] | tuple[Callable[..., Any], ...]

_SHOWN_DIGITS = 12


def checked_rows(name: str, rows: Rows, source: DatasetConfig) -> list[dict[str, Any]] | Path:
    """Return rows as plain dicts, each with a prompt and an answer, or the absolute path of a file of rows.

    ``name`` is the name of the argument in messages; ``source`` says which fields are the prompt and the
    answer. A row without an answer gets null. Raises ConfigError for rows that no run could use.
    """
    if isinstance(rows, str | Path):
        return _file(name, Path(rows))
    if not isinstance(rows, Iterable) or isinstance(rows, Mapping):
        raise ConfigError.of(name, f"is {type(rows).__name__}", "give a list of dicts, or the path of a file")
    checked = [_row(f"{name}[{index}]", row, source) for index, row in enumerate(rows)]
    if not checked:
        raise ConfigError.of(
            name, "has no rows", f'give at least one, such as {{"{source.prompt_key}": "1+1="}}'
        )
    return checked


def named_reward(reward: GivenReward, weights: Sequence[float] | None) -> Reward:
    """Return a reward function as it is, and a list of functions by their names, each with its weight.

    Without ``weights`` each function has the weight 1. Raises ConfigError for functions and weights that do
    not go together.
    """
    if not isinstance(reward, list | tuple):
        if weights is not None:
            raise ConfigError.of("reward_weights", "are for a list of functions", "give reward as a list")
        return reward
    if not reward:
        raise ConfigError.of("reward=[]", "has no function", "give at least one")
    functions: dict[str, Callable[..., Any]] = {}
    for index, function in enumerate(reward):
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function):
            raise ConfigError.of(f"reward[{index}]", f"is {name} and cannot be called", "give a function")
        if name in functions:
            rule = f"has the name {name!r} of another function of the list"
            raise ConfigError.of(f"reward[{index}]", rule, "define it with def under a name of its own")
        functions[name] = function
    return WeightedRewards(functions, dict(zip(functions, _weights(weights, len(functions)), strict=True)))


def _weights(given: Sequence[float] | None, count: int) -> list[float]:
    if given is None:
        return [1.0] * count
    if not isinstance(given, Sequence) or len(given) != count:
        raise ConfigError.of(
            f"reward_weights={given!r}", f"must be a list of {count} numbers, one per function of reward", ""
        )
    weights = [as_number(weight) for weight in given]
    for index, (weight, shown) in enumerate(zip(weights, given, strict=True)):
        if weight is None or not math.isfinite(weight):
            raise ConfigError.of(f"reward_weights[{index}]={shown!r}", "must be a finite number")
    return [weight for weight in weights if weight is not None]


def check_reward(reward: Reward, name: str, rows: list[dict[str, Any]] | Path, source: DatasetConfig) -> None:
    """Raise ConfigError unless each reward function can be called with the fields that every row has.

    ``name`` is the name of the argument that has the rows.
    """
    if not isinstance(reward, WeightedRewards):
        _check_function("reward", reward, name, rows, source)
        return
    for index, function in enumerate(reward.functions.values()):
        _check_function(f"reward[{index}]", function, name, rows, source)


def _check_function(
    argument: str,
    reward: Callable[..., Any],
    name: str,
    rows: list[dict[str, Any]] | Path,
    source: DatasetConfig,
) -> None:
    try:
        parameters = RewardParameters.of(reward)
    except UnfitReward as error:
        raise ConfigError.of(argument, str(error)) from error
    if isinstance(rows, Path):
        return
    own = {source.prompt_key, source.answer_key, source.images_key}
    for index, row in enumerate(rows):
        fields = [name for name in row if name not in own]
        if missing := parameters.missing(fields):
            has = ", ".join(map(repr, fields)) or "no further field"
            takes = ", ".join(map(repr, missing))
            raise ConfigError.of(
                argument,
                f"takes {takes}, which is neither of a turn nor in {name}[{index}], which has {has}",
                "name turn, prompt, response, answer, is_truncated or fields of the rows, or give the "
                "parameter a default",
            )


def write_rows(folder: Path, name: str, rows: list[dict[str, Any]] | Path) -> Path:
    """Write rows as JSON lines into ``folder`` and return the file; when ``rows`` is a file already, return
    it.

    Raises DiskFull or OSError.
    """
    if isinstance(rows, Path):
        return rows
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return _written(folder, name, "jsonl", lines.encode())


def write_reward(folder: Path, reward: Reward) -> Path:
    """Pickle the reward functions, with their code, into one file in ``folder`` and return the file.

    Raises ConfigError when a function cannot be pickled, DiskFull or OSError when the file cannot be
    written.
    """
    try:
        return _written(folder, "reward", "pickle", pickled_reward(reward))
    except UnfitReward as error:
        raise ConfigError.of("reward", str(error)) from error


def _written(folder: Path, name: str, ending: str, contents: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-{sha256(contents).hexdigest()[:_SHOWN_DIGITS]}.{ending}"
    write_whole(path, contents, f"the run's {path.name}")
    return path


def _file(name: str, path: Path) -> Path:
    if not path.is_file():
        raise ConfigError.of(f"{name}={path}", "is not a file", "give a list of dicts, or the path of a file")
    if path.suffix not in FILE_READERS:
        endings = ", ".join(FILE_READERS)
        raise ConfigError.of(
            f"{name}={path}", f"must end in {endings}", "convert it, or give a list of dicts"
        )
    return path.absolute()


def _row(where: str, row: Any, source: DatasetConfig) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        remedy = 'give a list of dicts; of a table of pandas: table.to_dict("records")'
        raise ConfigError.of(where, f"is {type(row).__name__} and no dict", remedy)
    if not row.get(source.prompt_key):
        there = ", ".join(map(repr, row)) or "nothing"
        rule = f"has no {source.prompt_key!r}, or an empty one; it has {there}"
        raise ConfigError.of(where, rule, "overrides=['data.default.prompt_key=NAME'] names another field")
    for key, value in row.items():
        try:
            json.dumps({key: value}, ensure_ascii=False).encode()
        except (TypeError, ValueError) as error:
            rule = f"has a field {key!r} that JSON cannot hold: {error}"
            raise ConfigError.of(where, rule, "make it text, a number, a list or a dict") from error
    try:
        answer_text(row.get(source.answer_key), f"field {source.answer_key!r}")
    except ValueError as error:
        raise ConfigError.of(where, f"cannot be used: {error}") from error
    return {source.answer_key: None, **row}
