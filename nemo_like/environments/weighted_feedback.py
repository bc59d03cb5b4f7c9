"""Adds up what several components say about one turn, each with its weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.environments.feedback import checked
from nemo_like.environments.interface import Failure, FailureKind, Feedback, Turn


def weighted_feedback(turn: Turn, weights: Mapping[str, float], given: Sequence[Feedback]) -> Feedback:
    """Return the weighted sum of the components' checked feedback to a turn; ``given`` is in the order of
    ``weights``, which has the components' names.

    Each component's reward, times its weight, becomes a component of the sum under its name. The parts of
    that reward before the weight, and the component's own metrics, become metrics with its name in front.
    A component that abstains is left out; when all do, the sum has no reward.
    """
    rewards: dict[str, float | None] = {}
    metrics: dict[str, float] = {}
    columns: dict[str, Any] = {}
    # An answer to another turn keeps that turn's number, so that the caller notices it.
    others = (one.turn_number for one in given if one.turn_number != turn.number)
    turn_number = max(others, default=turn.number)
    for (name, weight), one in zip(weights.items(), given, strict=True):
        if one.failure is not None and one.failure.kind is FailureKind.abstained:
            rewards[name] = None
            continue
        if (failure := _failure(name, one)) is not None:
            return Feedback(failure=failure, turn_number=turn_number)
        rewards[name] = weight * (one.reward or 0.0)
        metrics |= {
            f"{name}/reward/{part}": value for part, value in one.rewards.items() if value is not None
        }
        metrics |= {f"{name}/{metric}": value for metric, value in one.metrics.items()}
        columns |= one.columns
    # A large weight may lead beyond float32; and all components may abstain.
    if (failure := checked(Feedback(rewards)).failure) is not None:
        return Feedback(failure=failure, turn_number=turn_number)
    return Feedback(rewards, metrics=metrics, columns=columns, turn_number=turn_number)


def _failure(name: str, feedback: Feedback) -> Failure | None:
    """Return why a component's feedback cannot be added to others; None when it can."""
    if feedback.failure is not None:
        return Failure(feedback.failure.kind, f"component {name}: {feedback.failure.reason}")
    if not feedback.is_done:
        return Failure(
            FailureKind.malformed,
            f"component {name}: it answers the response, and a weighted sum has no further turn",
        )
    return None
