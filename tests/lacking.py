"""What becomes of a test on a machine that lacks what the test needs."""

from __future__ import annotations

import os
import warnings
from typing import TypeVar

import pytest

NO_GPU = "needs a CUDA device"
RULE = "under CI=true nothing is left out, unless it is for want of a GPU (docs/explanation/testing.md)"
REASONING_GYM = (
    "reasoning-gym is not installed; scripts/setup.sh --dev does it where there is a C compiler with "
    "Python's headers (on Debian and Ubuntu: gcc, libc6-dev and python3-dev)"
)
HUBS = "the packages of hubs are not installed; scripts/setup.sh --hubs makes .venv-hubs with them"

Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def nothing_may_be_left_out() -> bool:
    """Return whether a test that cannot run here is a failure: where CI=true."""
    return os.environ.get("CI") == "true"


def fall_back(reason: str) -> None:
    """Say that the running test goes on with less than it asks for; fail it where nothing may be left out."""
    if nothing_may_be_left_out():
        pytest.fail(f"{reason}; {RULE}", pytrace=False)
    warnings.warn(reason, stacklevel=2)


def judged(report: Report) -> Report:
    """Turn a skip into a failure that names test, reason and rule, where nothing may be left out."""
    if not (report.skipped and nothing_may_be_left_out()) or hasattr(report, "wasxfail"):
        return report
    _, _, reason = report.longrepr  # path, line and message of the skip
    reason = reason.removeprefix("Skipped: ")
    if reason != NO_GPU:
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} was skipped: {reason}\n{RULE}"
    return report
