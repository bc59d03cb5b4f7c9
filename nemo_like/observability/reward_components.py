"""Finds the components of rewards among a step's metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping

_COMPONENT = re.compile(r"(?:train/)?env/(?P<env>[^/]+)/reward/(?P<component>.+)")


def reward_components(metrics: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return the mean of every component of each environment's reward, by environment and component.

    ``metrics`` are the metrics of a training step, with or without the prefix ``train/``.
    """
    found: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        if match := _COMPONENT.fullmatch(name):
            found.setdefault(match["env"], {})[match["component"]] = value
    return found
