"""Writes what became of each test as soon as it ends, and reads it: also of tests that were cut off.

A plugin of pytest: ``-p scripts.gpu_check_parts.outcomes --outcomes=FILE``. The file has one JSON object per
line: the test, its outcome, why it was skipped or failed, what it measured, by ``record_property``, and the
traceback of one that failed, which pytest itself prints only when all have ended.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class TestCounts:
    """What became of the tests that ended."""

    __test__ = False

    passed: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # what was raised, by test
    skipped: dict[str, str] = field(default_factory=dict)  # reasons by test
    measured: dict[str, dict[str, Any]] = field(default_factory=dict)  # by test


def read_outcomes(path: Path) -> TestCounts:
    """Read what the plugin wrote; everything is empty where there is nothing."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    counts, passed = TestCounts(), set()
    for line in filter(None, lines):
        try:
            one = json.loads(line)
        except ValueError:  # the last line of a process that was killed
            continue
        name = one["test"]
        if one["measured"]:
            counts.measured[name] = one["measured"]
        if one["outcome"] == "failed" and name not in counts.failed:
            counts.failed[name] = one["reason"]
        elif one["outcome"] == "skipped":
            counts.skipped[name] = one["reason"]
        elif one["outcome"] == "passed":
            passed.add(name)
    counts.passed = len(passed.difference(counts.failed))
    return counts


def pytest_addoption(parser: Any) -> None:
    parser.addoption("--outcomes", type=Path, help="gets a line for each test that ends")


def pytest_configure(config: Any) -> None:
    # With several processes the one that began hears of all tests.
    if config.getoption("outcomes") is not None and not hasattr(config, "workerinput"):
        config.getoption("outcomes").unlink(missing_ok=True)
        config.pluginmanager.register(_Writer(config.getoption("outcomes")))


class _Writer:
    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write of each phase of a test what is news: that it failed, was skipped, or passed."""
        if report.passed and report.when != "call":
            return
        line = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "reason": _reason(report),
            "measured": dict(report.user_properties) if report.when == "call" else {},
        }
        if report.failed:
            line["traceback"] = report.longreprtext
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")


def _reason(report: Any) -> str:
    """Return why a test was skipped, or what it raised; empty for one that passed."""
    if report.skipped and isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return crash.message if crash is not None else report.longreprtext
