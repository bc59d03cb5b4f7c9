from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.environments import hub, hub_process
from nemo_like.environments.hub import HubEnvironment
from nemo_like.environments.hub_process import HubDied, HubProcess
from nemo_like.environments.interface import Turn

# Like hub_main.py, but for a package that answers every call before it reads the next one.
ECHO = """
import json, sys
sys.stdin.readline()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    call = json.loads(line)
    if call["method"] == "end":
        break
    print(json.dumps({"id": call["id"], "result": call["arguments"]["text"]}), flush=True)
"""


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HubProcess:
    program = tmp_path / "hub.py"
    program.write_text(ECHO)
    monkeypatch.setattr(hub_process, "_MAIN", program)
    monkeypatch.setattr(hub_process, "_start", lambda options: {"adapter": "echo"})
    options: Any = SimpleNamespace(python=None)
    return HubProcess(options)


def test_calls_and_answers_that_no_pipe_holds_do_not_wait_for_each_other(process: HubProcess) -> None:
    """A pipe has 64 KiB: here each side has much more to write than the other has read."""
    texts = [f"{number}" * 20_000 for number in range(100)]

    async def scenario() -> list[str]:
        calls = (process.call("step", text=text) for text in texts)
        return await asyncio.wait_for(asyncio.gather(*calls), 60.0)

    assert asyncio.run(scenario()) == texts


def test_a_call_to_a_process_that_has_ended_is_told_so(process: HubProcess) -> None:
    async def scenario() -> None:
        for method in ("end", "step"):
            with pytest.raises(HubDied):
                await asyncio.wait_for(process.call(method, text=""), 60.0)

    asyncio.run(scenario())


class _Ended(BaseException):
    """Stands in for the end of this process."""


def test_an_environment_ends_with_its_package_so_that_both_are_replaced(
    process: HubProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise _Ended

    async def ended(*args: Any, **kwargs: Any) -> Any:
        raise HubDied

    monkeypatch.setattr(hub.os, "_exit", end)
    monkeypatch.setattr(hub, "HubProcess", lambda options: process)
    monkeypatch.setattr(process, "call", ended)
    options: Any = SimpleNamespace()
    environment = HubEnvironment(options)
    turn = Turn(prompt="p", response="r", answer="", is_truncated=False, data={"episode": {}})
    with pytest.raises(_Ended):
        asyncio.run(environment.step([turn]))  # type: ignore[arg-type]
    assert codes == [1]
