"""Checks the answers of an environment's code, so that a malformed answer costs only its own sample."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_like.batch.columns import Column
from nemo_like.data.image_marks import with_marks, with_parts_as_marks
from nemo_like.data.images import ImageError, Picture, pictures_of
from nemo_like.data_plane.storage_errors import ColumnMismatch
from nemo_like.environments.column_values import NotFinite, column_value
from nemo_like.environments.interface import ABSTAINED_SHARE, UNNUMBERED, Failure, FailureKind, Feedback

# The largest float32: advantages of a training batch are float32, whose squares fit into float64.
_LARGEST = 3.4028234663852886e38
_MAX_SHOWN_CHARACTERS = 80
# Names of the rollout's own metrics for every environment, under env/<name>/.
_TAKEN_METRICS = (
    *("reward", "reward_std", "baseline_reward"),
    *("num_samples", "num_failed_rewards", "failed_reward_share", ABSTAINED_SHARE),
)


class Malformed(Exception):
    """An answer is not a proper ``Feedback``; ``failure`` says which part is wrong and why."""

    def __init__(self, reason: str, kind: FailureKind = FailureKind.malformed) -> None:
        super().__init__(reason)
        self.failure = Failure(kind, reason)


def checked(
    answer: object, columns: Sequence[Column] = (), num_tokens: int = 0, turn_number: int = UNNUMBERED
) -> Feedback:
    """Return the answer as plain ``Feedback`` with Python's own numbers; a failed one for a malformed answer.

    Numbers may be Python's, numpy's, or anything without dimensions that has ``item``; they must be finite
    and fit into float32. Feedback with ``is_done=False`` needs an observation, which comes back as text with
    ``<image>`` for each of its images; files of images are read. Values of columns must fit ``columns``,
    which the environment declares, and a response of ``num_tokens``. The feedback gets ``turn_number``, the
    number of the turn.
    """
    try:
        return _plain(answer, columns, num_tokens, turn_number)
    except Malformed as error:
        return Feedback(failure=error.failure, turn_number=turn_number)


def as_number(value: Any) -> float | None:
    """Return any real number as a float, including numpy's scalars and arrays without dimensions; None for
    any other value."""
    if getattr(value, "ndim", None) == 0 and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _plain(answer: object, columns: Sequence[Column], num_tokens: int, turn_number: int) -> Feedback:
    """Return the answer as plain ``Feedback``. Raises Malformed."""
    if not isinstance(answer, Feedback):
        raise Malformed(f"the environment gave {_shown(answer)}, not a Feedback")
    if answer.failure is not None:
        return Feedback(failure=_failure(answer.failure), turn_number=turn_number)
    observation, images = _observation(answer)
    is_done = as_number(answer.is_done)
    if is_done not in (0.0, 1.0):
        raise Malformed(f"is_done is {_shown(answer.is_done)}, not true or false")
    if not is_done and observation is None:
        raise Malformed("the environment is not done but has no observation")
    return Feedback(
        rewards=_rewards(answer.rewards, is_done=bool(is_done)),
        observation=observation,
        images=images,
        is_done=bool(is_done),
        metrics=_metrics(answer.metrics),
        state=answer.state,
        columns=_columns(answer.columns, columns, num_tokens) if answer.columns else {},
        turn_number=turn_number,
    )


def _observation(answer: Feedback) -> tuple[str | None, tuple[Picture, ...]]:
    """Return the observation's text, or None, and its images. Image files are read here, where the
    environment runs: the rollout may be on another machine."""
    where, given = "the observation", answer.observation
    try:
        images = pictures_of(answer.images, None, where)
        if isinstance(given, list | tuple):
            [message], images = with_parts_as_marks([{"content": given}], images, None, where)
            given = message["content"]
        if given is None and not images:
            return None, ()
        text = _text("" if given is None else given, where)
        if not images:
            return text, ()
        marked = with_marks(text, len(images), where)
        return str(marked), tuple(replace(picture, source=picture.read()) for picture in images)
    except ImageError as error:
        raise Malformed(encodable(str(error)), FailureKind.bad_image) from error


def _failure(failure: object) -> Failure:
    if not isinstance(failure, Failure) or not isinstance(failure.kind, FailureKind):
        raise Malformed(f"failure is {_shown(failure)}, not a Failure")
    return Failure(failure.kind, encodable(str(failure.reason)))


def _rewards(values: object, *, is_done: bool) -> dict[str, float | None]:
    """Return the components of a reward, None for a component that abstains.

    When all abstain, a turn that ends the conversation raises Malformed; an earlier turn does not, since
    later turns may judge.
    """
    mapping = values if isinstance(values, Mapping) else {}
    silent: dict[str, float | None] = {name: None for name, value in mapping.items() if value is None}
    if not silent:
        return {**_numbers(values, "reward")}
    judged = _numbers({name: value for name, value in mapping.items() if name not in silent}, "reward")
    if judged:
        return {_text(name, "the name of a reward"): judged.get(name) for name in mapping}
    if is_done:
        raise Malformed(
            f"the reward is None ({', '.join(map(str, silent))}), so nothing judged the sample; a function "
            "without a return statement returns None too",
            FailureKind.abstained,
        )
    return {_text(name, "the name of a reward"): None for name in mapping}


def _metrics(values: object) -> dict[str, float]:
    metrics = _numbers(values, "metric")
    for name in metrics:
        if name.partition("/")[0] in _TAKEN_METRICS:
            raise Malformed(f"the metric {name!r} has a name that every environment has already; rename it")
    return metrics


def _columns(values: object, columns: Sequence[Column], num_tokens: int) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise Malformed(f"the columns are {_shown(values)}, not a mapping of names to values")
    declared = {column.name: column for column in columns}
    if unknown := values.keys() - declared.keys():
        raise Malformed(
            f"it brings the columns {sorted(map(str, unknown))}, and declares {sorted(declared)} (with "
            "nemo_like.batch.columns.writes)"
        )
    given = {}
    for name, value in values.items():
        try:
            given[name] = column_value(declared[name], value, num_tokens)
        except NotFinite as error:
            raise Malformed(str(error), FailureKind.not_finite) from error
        except ColumnMismatch as error:
            raise Malformed(str(error)) from error
    return given


def _numbers(values: object, what: str) -> dict[str, float]:
    # Most answers are plain dicts: comparing the type first saves a third of an environment's time.
    if type(values) is not dict and not isinstance(values, Mapping):
        raise Malformed(f"the {what}s are {_shown(values)}, not a mapping of names to numbers")
    return {
        _text(name, f"the name of a {what}"): _number(name, value, what) for name, value in values.items()
    }


def _number(name: object, value: object, what: str) -> float:
    number = value if type(value) is float else as_number(value)
    if number is None:
        raise Malformed(f"the {what} {name!r} is {_shown(value)}, not a number")
    if not math.isfinite(number):
        raise Malformed(f"the {what} {name!r} is {number}", FailureKind.not_finite)
    if abs(number) > _LARGEST:
        raise Malformed(f"the {what} {name!r} is {number:g}, beyond float32", FailureKind.not_finite)
    return number


def _text(value: object, what: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{what} is {_shown(value)}, not text")
    if not value.isascii() and encodable(value) != value:
        raise Malformed(f"{what} is {_shown(value)}, which UTF-8 cannot encode")
    return str(value)


def encodable(text: str) -> str:
    """Return the text with "?" for each character that UTF-8 cannot encode, such as a lone surrogate."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _shown(value: object) -> str:
    shown = encodable(repr(value))
    return shown if len(shown) <= _MAX_SHOWN_CHARACTERS else shown[:_MAX_SHOWN_CHARACTERS] + "..."
