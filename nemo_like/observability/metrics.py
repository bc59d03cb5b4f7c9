"""Metrics that carry their reduction, so that merging over ranks and micro-batches needs no names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class Reduction(Enum):
    mean = "mean"  # weighted by ``weight``
    sum = "sum"
    min = "min"
    max = "max"


@dataclass(frozen=True, slots=True)
class Metric:
    """A partial value of a metric, to be merged with others.

    For ``mean``, ``total`` is the weighted sum and ``weight`` the sum of weights. For the other reductions,
    ``total`` is the reduced value.
    """

    total: float
    weight: float
    reduction: Reduction

    @property
    def value(self) -> float:
        """The number to report; a mean without any weight is 0."""
        if self.reduction is Reduction.mean:
            return self.total / self.weight if self.weight else 0.0
        return self.total


def mean(total: float, weight: float = 1.0) -> Metric:
    """Return a metric that is a mean, from its weighted sum and its weight."""
    return Metric(float(total), float(weight), Reduction.mean)


def summed(value: float) -> Metric:
    return Metric(float(value), 1.0, Reduction.sum)


def minimum(value: float) -> Metric:
    return Metric(float(value), 1.0, Reduction.min)


def maximum(value: float) -> Metric:
    return Metric(float(value), 1.0, Reduction.max)


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge many mappings into one, each metric by its own reduction.

    Raises ValueError when two parts disagree on a metric's reduction.
    """
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = _combine(name, merged[name], metric) if name in merged else metric
    return merged


def _combine(name: str, first: Metric, second: Metric) -> Metric:
    if first.reduction is not second.reduction:
        raise ValueError(
            f"metric {name!r} is recorded as {first.reduction.name} and as {second.reduction.name}"
        )
    if first.reduction is Reduction.min:
        return min(first, second, key=lambda metric: metric.total)
    if first.reduction is Reduction.max:
        return max(first, second, key=lambda metric: metric.total)
    return Metric(first.total + second.total, first.weight + second.weight, first.reduction)
