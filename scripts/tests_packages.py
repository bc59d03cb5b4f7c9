"""For scripts that use modules of tests/, and with them packages that only the tests need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OURS = ("nemo_like", "scripts", "tests")


@contextmanager
def packages_of_the_tests() -> Iterator[None]:
    """End the process with one line and exit code 2 when an import of the block lacks a package."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] in _OURS:
            raise
        said = f"{Path(sys.argv[0]).name} uses modules of tests/, which need {error.name}"
        print(f"{said}; it is not installed: bash scripts/setup.sh --dev", file=sys.stderr)
        sys.exit(2)
