from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from nemo_like.environments import agent_command
from nemo_like.environments.agent_command import CommandRunner
from nemo_like.environments.interface import AgentAccess, Turn
from nemo_like.environments.registry import options_of
from tests.unit.environments.configs import env_config

# Leaves a process behind that has left its group, and holds its output open.
LEAVES_ONE = """
import subprocess, sys
left = subprocess.Popen(["sleep", "3600"], start_new_session=True)
open(sys.argv[1], "w").write(str(left.pid))
"""


def test_what_a_command_without_a_sandbox_left_behind_keeps_no_call_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_command, "_END_TIMEOUT_S", 0.2)
    left = tmp_path / "left"
    command = {"command": [sys.executable, "-c", LEAVES_ONE, str(left)], "sandbox": "none", "timeout_s": 3.0}
    options = options_of(env_config("agent", options=command))
    turn = Turn(prompt="p", response="", answer="", is_truncated=False)
    access = AgentAccess("http://127.0.0.1:1/v1", "key", "again")

    async def scenario() -> None:
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(options.timeout_s):
                    await CommandRunner(options).run(turn, access)
        finally:
            os.kill(int(left.read_text()), signal.SIGKILL)
            await asyncio.sleep(0.1)  # its pipes close

    asyncio.run(asyncio.wait_for(scenario(), 60.0))
