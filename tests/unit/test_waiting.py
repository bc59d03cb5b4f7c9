"""Waits are futures, conditions and callbacks with deadlines."""

from __future__ import annotations

import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "nemo_like"
# Other people's programs that say nothing when they are ready are tried again, by a library.
TRIED_AGAIN = {
    "environments/remote.py",  # a request to a server that could not answer it
    "data_plane/mooncake.py",  # until Mooncake's master listens
}


def modules_with(pattern: str) -> set[str]:
    return {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(pattern, path.read_text(encoding="utf-8"))
    }


def test_nothing_in_the_package_sleeps() -> None:
    # An engine's own sleep gives up its memory, and nobody waits.
    assert modules_with(r"\b(time|asyncio)\.sleep\(|from (time|asyncio) import [^\n]*\bsleep\b") == set()


def test_nothing_is_tried_again_but_what_tells_nobody_when_it_is_ready() -> None:
    assert modules_with(r"\btenacity\b") == TRIED_AGAIN
