from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from nemo_like.child_process.parent_side import ChildDied
from nemo_like.environments import hub
from nemo_like.environments.hub import HubCallFailed, HubEnvironment, HubProcess, HubRefused, listed_prompts
from nemo_like.environments.interface import Exchange, Failure, FailureKind, Turn
from nemo_like.environments.shared_options import EPISODE_KEY, HubOptions

# An episode adds up the lengths of responses.
ADAPTER = """
import os, sys

from hub_interface import HubFailure, HubPrompt, TurnOutcome

class Episode:
    total = 0

    async def step(self, response, is_last):
        self.total += len(response)
        return TurnOutcome(str(self.total), {"length": float(self.total)})

    async def close(self):
        pass

class Hub:
    def __init__(self, answer):
        if answer is None:
            raise ValueError("no answer")
        self.answer = answer

    async def prompts(self, size, seed):
        if size > 9:
            raise KeyError("too many")
        if not size:
            print("last words", file=sys.stderr)
            os._exit(3)
        return [HubPrompt(f"{seed + index}?", {"seed": seed + index}, self.answer) for index in range(size)]

    async def open(self, data):
        if data is None:
            raise HubFailure("timed_out", "the server is gone")
        if data["seed"] == 7:
            return Episode()
        raise LookupError("no such episode")
"""


@dataclass(kw_only=True)
class Options(HubOptions):
    adapter: ClassVar[str] = "an_adapter:Hub"
    python: str | None = None
    answer: str | None = "yes"


@pytest.fixture(autouse=True)
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "an_adapter.py").write_text(ADAPTER)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_problems_of_a_hub_follow_from_its_options_and_the_seed() -> None:
    assert listed_prompts(Options(), size=2, seed=5) == [
        {"prompt": "5?", "data": {"seed": 5}, "answer": "yes"},
        {"prompt": "6?", "data": {"seed": 6}, "answer": "yes"},
    ]


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        (Options(answer=None), 1, "ValueError: no answer"),
        (Options(), 10, "KeyError: 'too many'"),
        (Options(), 0, "its process ended with exit code 3: last words"),
        (Options(python="/no/python"), 1, "/no/python could not be started: .* No such file or directory"),
    ],
)
def test_a_hub_that_makes_no_problems_says_why(options: Options, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        listed_prompts(options, size, seed=0)


def test_an_episode_stays_between_its_turns_and_is_played_again_where_it_was_not() -> None:
    turn = Turn(prompt="7?", response="four", answer="", is_truncated=False, data={EPISODE_KEY: {"seed": 7}})
    turn = replace(turn, is_last=False)

    async def two_turns(environment: HubEnvironment, other: HubEnvironment) -> None:
        (first,) = await environment.step([turn])
        exchange = Exchange(response=turn.response, observation=first.observation)
        later = replace(turn, response="three", history=(exchange,), state=first.state)
        for asked in (environment, other):
            (second,) = await asked.step([later])
            assert (second.rewards, second.observation) == ({"length": 9.0}, "9")

    environments = [HubEnvironment(Options()) for _ in range(2)]
    asyncio.run(two_turns(*environments))
    for environment in environments:
        environment._process.close()


@pytest.mark.parametrize(
    ("problem", "failure"),
    [
        (None, Failure(FailureKind.timed_out, "the server is gone")),
        ({"seed": 8}, Failure(FailureKind.raised, "LookupError: no such episode")),
    ],
)
def test_a_call_that_fails_says_in_which_way(problem: Any, failure: Failure) -> None:
    with closing(HubProcess(Options())) as process, pytest.raises(HubCallFailed) as failed:
        asyncio.run(
            process.call("step", episode="one", data=problem, history=[], response="r", is_last=False)
        )
    assert failed.value.failure == failure


def test_a_hub_that_refuses_its_options_says_so() -> None:
    with pytest.raises(HubRefused, match="ValueError: no answer"):
        HubProcess(Options(answer=None))


class _Ended(BaseException):
    """Stands in for the end of this process."""


def test_an_environment_ends_with_its_package_so_that_both_are_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise _Ended

    async def ended(*args: Any, **kwargs: Any) -> Any:
        raise ChildDied("exit code 3")

    monkeypatch.setattr(hub.os, "_exit", end)
    monkeypatch.setattr(hub, "HubProcess", lambda options: SimpleNamespace(call=ended))
    options: Any = SimpleNamespace()
    environment = HubEnvironment(options)
    turn = Turn(prompt="p", response="r", answer="", is_truncated=False, data={"episode": {}})
    with pytest.raises(_Ended):
        asyncio.run(environment.step([turn]))  # type: ignore[arg-type]
    assert codes == [1]
