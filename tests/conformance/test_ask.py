from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conformance import ask, report
from tests.conformance.adapters import Asked, Padded
from tests.conformance.generate import load


def framework(monkeypatch: pytest.MonkeyPatch, compute: Any) -> dict[str, Any]:
    """What is found of a framework whose loss is ``compute``, asked for the first case alone."""
    case = load("cases")[0]
    adapter = SimpleNamespace(
        NAME="Other",
        SPLITS=("whole", "one by one"),
        REMARK="A remark.",
        ESTIMATORS={},
        version=lambda: "1.0",
        plan=lambda one: [Asked(one, {"kind": "plain"})],
        micro_batch_loss=compute,
    )
    monkeypatch.setitem(sys.modules, "tests.conformance.against_other", adapter)
    monkeypatch.setattr(ask, "load", lambda name: [case] if name == "cases" else load(name))
    return ask.ask("other")


def page(found: dict[str, Any]) -> str:
    return report.report({"passed": 1, "total": 1, "worst": 0.0}, [found])


def test_a_loss_that_raises_is_not_equal_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute(padded: Padded, asked: Asked) -> Any:
        raise AttributeError("renamed")

    found = framework(monkeypatch, compute)
    (answer,) = found["answers"]
    assert answer["status"] == "raised"
    assert answer["raised"].startswith("AttributeError: renamed (batch ")
    text = page(found)
    assert "0 are equal to the reference on all batches but" in text and "and 0 on all." in text
    assert "1 raised an error: " in text and "`AttributeError: renamed (batch " in text
    assert "| raised | raised |" in text


def test_a_loss_of_its_own_deviates_for_an_unknown_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    found = framework(monkeypatch, lambda padded, asked: (padded.logprobs * padded.mask).sum() * 17.0)
    assert found["answers"][0]["status"] == "unexplained"
    text = page(found)
    assert "**1 deviate for reasons that are not known.**" in text
    assert "A remark." in text
