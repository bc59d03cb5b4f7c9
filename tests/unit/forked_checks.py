"""Child processes of slow checks for unit tests: forks of a warm server, which has imported what checks load.

Nearly all of a check's time is the import of torch and transformers. ``tests/unit/preflight/test_child.py``
starts real children, and so does the first check of the functional tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

from nemo_like.preflight.child import ChildCall
from tests.functional.forked_process import ForkedProcess
from tests.functional.warm_servers import CHECK, forked_check

_Popen = subprocess.Popen


class ForkedCall(ChildCall):
    """To be used in the place of ``ChildCall``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> None:
        with mock.patch.object(subprocess, "Popen", _forked_or_started):
            super().__init__(function, *arguments, timeout_s=timeout_s)


def _forked_or_started(
    command: Sequence[str], *, env: Mapping[str, str], stdin: int, stdout: int, **others: Any
) -> ForkedProcess | subprocess.Popen[bytes]:
    """Return the fork that answers the call; a process as ever where warm servers are too many already."""
    assert list(command) == [sys.executable, "-m", CHECK]
    assert others == {"stderr": subprocess.PIPE, "start_new_session": True}
    errors, theirs = os.pipe()
    with mock.patch.object(subprocess, "Popen", _Popen):  # which starts the server
        fork = forked_check(env, [stdin, stdout, theirs], at_once=True)
    os.close(theirs)
    if fork is None:
        os.close(errors)
        return _Popen(command, env=env, stdin=stdin, stdout=stdout, **others)
    fork.stderr = os.fdopen(errors, "rb")
    return fork
