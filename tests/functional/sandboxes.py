"""Whether this machine lets programs be put into a sandbox."""

from __future__ import annotations

import pytest

from nemo_like.environments.sandbox import ProgramLimits, Sandbox, check_sandbox

SANDBOX = Sandbox(ProgramLimits(timeout_s=30.0, memory_mib=512, max_processes=16))


def _lacking() -> str:
    try:
        check_sandbox(SANDBOX)
    except RuntimeError as error:
        return str(error)
    return ""


needs_sandbox = pytest.mark.skipif(bool(_lacking()), reason=_lacking())
