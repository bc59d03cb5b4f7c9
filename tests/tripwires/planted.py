"""Runs of the real thing with one mutation planted in all of its processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.tripwires.mutations import MUTATIONS

PLANTING = Path(__file__).resolve().parent / "planting"
ROOT = PLANTING.parents[2]


def environment_with(name: str, log: Path) -> Mapping[str, str]:
    """Return this process's environment variables, and those that plant a mutation in a run.

    Every process in which the mutation's target was replaced adds a line to the file ``log``. Raises KeyError
    for an unknown name.
    """
    path = [str(PLANTING), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "NEMO_LIKE_MUTATION": MUTATIONS[name].name,
        "NEMO_LIKE_MUTATION_LOG": str(log),
    }
