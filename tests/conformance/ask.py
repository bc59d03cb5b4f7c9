"""Asks one framework for every case, and compares: python -m tests.conformance.ask trl|verl OUTPUT.json

It runs where the framework is installed, and imports nothing of nemo_like.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.conformance.adapters import Absent, Asked, run_split
from tests.conformance.conventions import evaluate_as
from tests.conformance.generate import load
from tests.conformance.reference import evaluate

# What float64 leaves of two ways to compute the same.
TOLERANCE = 1e-7


def ask(framework: str) -> dict[str, Any]:
    """Return the framework's name, version, and for each case what it gave: see ``_answer``."""
    adapter = importlib.import_module(f"tests.conformance.against_{framework}")
    batches, answers = load("batches"), []
    for case in load("cases"):
        asked = adapter.plan(case)
        if isinstance(asked, Absent):
            answers.append({"case": case["name"], "status": "absent", "reason": asked.reason})
        else:
            answers += [{"case": case["name"], **_answer(adapter, one, batches)} for one in asked]
    return {
        "framework": adapter.NAME,
        "version": adapter.version(),
        "torch": torch.__version__,
        "splits": adapter.SPLITS,
        "answers": answers,
    }


def _answer(adapter: Any, asked: Asked, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the status (equal, explained, or unexplained), the largest deviation with its batch and split,
    the conventions without which the framework's numbers would be others, and what it raised first."""
    worst, at, unexplained, raised = 0.0, "", "", ""
    because: set[str] = set()
    for one in batches:
        table = torch.tensor(one["table"], dtype=torch.float64)
        expected = evaluate(table, one["samples"], asked.case)
        for split in adapter.SPLITS:
            where = f"{one['name']}, {split}"
            try:
                found = run_split(one, split, partial(_computed, adapter, asked))
            except Exception as error:
                raised = raised or f"{type(error).__name__}: {error} ({where})"
                continue
            deviation = deviation_of(found, expected)
            if deviation <= TOLERANCE:
                continue
            if deviation > worst:
                worst, at = deviation, where
            reasons = _reasons(one, asked, split, found)
            if reasons is None:
                unexplained = unexplained or where
            because |= reasons or set()
    status = "equal" if not worst else "unexplained" if unexplained else "explained"
    return {
        "asked": asked.label,
        "status": status,
        "deviation": worst,
        "at": at,
        "because": sorted(because),
        "unexplained_at": unexplained,
        "raised": raised,
    }


def _computed(adapter: Any, asked: Asked, padded: Any) -> Any:
    return adapter.micro_batch_loss(padded, asked)


def _reasons(one: dict[str, Any], asked: Asked, split: str, found: dict[str, Any]) -> set[str] | None:
    """Return the conventions that are needed to reproduce ``found``; None where even all do not."""

    def misses(names: Collection[str]) -> bool:
        return deviation_of(found, evaluate_as(one, asked.case, split, names)) > TOLERANCE

    every = set(asked.conventions)
    if misses(every):
        return None
    return {name for name in every if misses(every - {name})} or every


def deviation_of(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return how far the gradient is from the expected one, relative to its norm; the loss's where more."""
    theirs, ours = (torch.tensor(one["gradient"], dtype=torch.float64) for one in (found, expected))
    gap = (theirs - ours).norm() / ours.norm().clamp(min=1e-12)
    of_loss = abs(found["loss"] - expected["loss"]) / max(abs(expected["loss"]), 1e-3)
    worst = max(gap.item(), of_loss)
    return worst if worst == worst else float("inf")


def main(framework: str, output: str) -> None:
    """Write the answers as JSON."""
    warnings.simplefilter("ignore")
    Path(output).write_text(json.dumps(ask(framework), indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
