"""Asks one framework for every case, and compares: python -m tests.conformance.ask trl|verl OUTPUT.json

It runs where the framework is installed, and imports nothing of nemo_like.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.conformance.adapters import Absent, Asked, run_split
from tests.conformance.conventions import advantages_as, evaluate_as
from tests.conformance.generate import load
from tests.conformance.reference import advantages, evaluate

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
        "remark": adapter.REMARK,
        "answers": answers,
        "advantages": [_of_estimator(adapter, name, batches) for name in adapter.ESTIMATORS],
    }


def _answer(adapter: Any, asked: Asked, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far the framework is from the reference, at most over the splits of each batch.

    ``because`` has the conventions without which its numbers would be others; ``splits`` how far they depend
    on how the batch is split; ``raised`` the first error. The status is the first of "raised", "unexplained",
    "explained" and "equal" that holds for any batch.
    """
    found = {one["name"]: _on_batch(adapter, asked, one) for one in batches}
    statuses = {"raised": "raised", "unexplained": "unexplained", "explained": "deviation"}
    holding = (name for name, field in statuses.items() if any(one[field] for one in found.values()))
    return {
        "asked": asked.label,
        "status": next(holding, "equal"),
        "batches": found,
        "splits": max(one["splits"] for one in found.values()),
        "raised": next((one["raised"] for one in found.values() if one["raised"]), ""),
    }


def _of_estimator(adapter: Any, name: str, batches: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far advantages are from the reference's at most, and by which conventions. Samples without a
    generated token are not compared."""
    worst, is_unexplained = 0.0, False
    because: set[str] = set()
    every = set(adapter.ESTIMATORS[name])
    for one in batches:
        found = adapter.advantages(one["samples"], name)

        def gap(values: Sequence[float], one: dict[str, Any] = one, found: Sequence[float] = found) -> float:
            pairs = zip(found, values, one["samples"], strict=True)
            return max(abs(theirs - mine) for theirs, mine, sample in pairs if sum(sample["generated"]))

        deviation = gap(advantages(one["samples"], name))
        if deviation > TOLERANCE:
            worst = max(worst, deviation)
            is_unexplained |= gap(advantages_as(one["samples"], name, every)) > TOLERANCE
            because |= {
                reason
                for reason in every
                if gap(advantages_as(one["samples"], name, every - {reason})) > TOLERANCE
            }
    status = "unexplained" if is_unexplained else "explained" if worst else "equal"
    return {"estimator": name, "status": status, "deviation": worst, "because": sorted(because)}


def _on_batch(adapter: Any, asked: Asked, one: dict[str, Any]) -> dict[str, Any]:
    expected = evaluate(torch.tensor(one["table"], dtype=torch.float64), one["samples"], dict(asked.case))
    answer: dict[str, Any] = {"deviation": 0.0, "splits": 0.0, "unexplained": "", "raised": ""}
    because: set[str] = set()
    whole: dict[str, Any] | None = None
    for split in adapter.SPLITS:
        try:
            found = run_split(one, split, partial(_computed, adapter, asked))
        except Exception as error:
            answer["raised"] = f"{type(error).__name__}: {error} (batch {one['name']})"
            break
        whole = whole or found
        by_split, deviation = deviation_of(found, whole), deviation_of(found, expected)
        answer["splits"] = max(answer["splits"], by_split if by_split > TOLERANCE else 0.0)
        if deviation <= TOLERANCE:
            continue
        answer["deviation"] = max(answer["deviation"], deviation)
        reasons = _reasons(one, asked, split, found)
        if reasons is None:
            answer["unexplained"] = split
        because |= reasons or set()
    return {**answer, "because": sorted(because)}


def _computed(adapter: Any, asked: Asked, padded: Any) -> Any:
    return adapter.micro_batch_loss(padded, asked)


def _reasons(one: dict[str, Any], asked: Asked, split: str, found: dict[str, Any]) -> set[str] | None:
    """Return the conventions that are needed to reproduce ``found``; None where even all do not."""

    def misses(names: Collection[str]) -> bool:
        return deviation_of(found, evaluate_as(one, dict(asked.case), split, names)) > TOLERANCE

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
