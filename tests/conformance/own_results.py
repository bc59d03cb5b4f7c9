"""Runs nemo_like's own code on the whole kit, as ``ask`` runs another framework, for the report."""

from __future__ import annotations

from typing import Any

import torch

from tests.conformance import ours
from tests.conformance.ask import deviation_of
from tests.conformance.generate import load
from tests.conformance.reference import evaluate

# What float32 leaves: 1e-5 of the gradient's norm in "far", which has numbers as large as e^40, and 5e-5 of a
# loss whose terms nearly cancel out.
TOLERANCE = 1e-4


def own_results() -> dict[str, Any]:
    """Return how many combinations of case, batch, split and layout there are, how many pass, and how far the
    worst is."""
    batches, cases = load("batches"), load("cases")
    worst, passed, total = 0.0, 0, 0
    for one in batches:
        table = torch.tensor(one["table"], dtype=torch.float64)
        for case in cases:
            expected = evaluate(table, one["samples"], case)
            for number, split in enumerate(one["splits"]):
                layout = [*ours.RowLayout][number % len(ours.RowLayout)]
                deviation = deviation_of(ours.run(one, case, split, layout), expected)
                worst, total = max(worst, deviation), total + 1
                passed += deviation <= TOLERANCE
    return {"passed": passed, "total": total, "worst": worst}
