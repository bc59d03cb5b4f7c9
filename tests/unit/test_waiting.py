"""Waits are futures, conditions and callbacks with deadlines."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "nemo_like"
# Programs that are not ours and say nothing when they are ready.
ALLOWED = {
    "environments/remote.py": 1,  # before a request is sent again to a server that could not answer it
    "data_plane/mooncake.py": 1,  # until Mooncake's master listens
}


def test_nothing_in_the_package_sleeps_and_polls() -> None:
    found = {
        str(path.relative_to(PACKAGE)): count
        for path in PACKAGE.rglob("*.py")
        if (count := len(re.findall(r"\bsleep\(", path.read_text(encoding="utf-8"))))
    }
    assert found == ALLOWED
