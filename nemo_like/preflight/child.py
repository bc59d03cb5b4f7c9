"""Calls a function in a Python process of its own, so that its imports and crashes stay there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from nemo_like.child_process.child_side import ParentCalls
from nemo_like.child_process.parent_side import Child, own_environment
from nemo_like.observability.printable import accept_all_characters

# A check downloads nothing from the hub.
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


class ChildCall:
    """A call that runs in a new process. Leaving the ``with`` block kills its whole process group."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> None:
        """Start ``function(*arguments)``, all picklable. The function's output stays off the terminal."""
        self._child = Child(
            [sys.executable, "-m", __name__], own_environment() | _OFFLINE, stderr=subprocess.PIPE
        )
        self._call = self._child.call(function, *arguments, timeout_s=timeout_s)

    def __enter__(self) -> ChildCall:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.kill()

    def result(self) -> Any:
        """Wait for the function's result and return it.

        Raises ChildFailed when the function raised or its process ended, and ChildIsLate ``timeout_s`` after
        the start.
        """
        return self._call.result()


def main() -> None:
    """Answer one call, in the process that ``ChildCall`` starts."""
    calls = ParentCalls()
    accept_all_characters()
    calls.answer_first(lambda function, *arguments: function(*arguments))
    # Exit at once, without waiting for threads and exit handlers of what was imported.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
