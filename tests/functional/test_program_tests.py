"""Programs that pass their tests, programs that only seem to, and tests that cannot be asked by value."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from nemo_like.environments import cpu_account
from nemo_like.environments.cpu_account import ControlGroup, Look
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from tests.functional.sandboxes import needs_sandbox
from tests.unit.environments.asking import ask, turn

pytestmark = needs_sandbox

DOUBLE = "assert double(3) == 6\nassert double(0) == 0\nassert double(-4) == -8"


def sections(name: str) -> dict[str, str]:
    """The parts of a file in ``programs``, each after a line with its title."""
    text = (Path(__file__).parent / "programs" / f"{name}.txt").read_text()
    parts = (part.partition("\n") for part in text.split("\n=== ")[1:])
    return {title: content for title, _, content in parts}


def code_turn(program: str, tests: Any) -> Turn:
    return turn(f"I think\n```python\n{program}\n```\nis right", data={"tests": tests})


def judge_all(pairs: Iterable[tuple[str, Any]], **options: Any) -> list[Feedback]:
    """One environment's feedback to programs with their tests."""
    return ask("code", *(code_turn(*pair) for pair in pairs), **{"timeout_s": 30.0, **options})


def judge(program: str, tests: Any, **options: Any) -> Feedback:
    (feedback,) = judge_all([(program, tests)], **options)
    return feedback


def reward(program: str, tests: Any, **options: Any) -> float:
    feedback = judge(program, tests, **options)
    assert feedback.failure is None
    return feedback.rewards["passed"]


# Honest programs

HONEST: dict[str, tuple[str, Any]] = {
    **{
        name: (program, tests)
        for name, text in sections("honest").items()
        for program, _, tests in [text.partition("--- tests\n")]
    },
    "standard input": (
        "print(int(input()) * 2)",
        [{"input": "3", "output": "6"}, {"input": "4", "output": "8\n"}],
    ),
    "standard input and sys.exit": ("import sys\nprint(5)\nsys.exit(0)", [{"input": "", "output": "5"}]),
}


@pytest.fixture(scope="module")
def honest() -> dict[str, Feedback]:
    return dict(zip(HONEST, judge_all(HONEST.values()), strict=True))


@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_earns_all(honest: dict[str, Feedback], name: str) -> None:
    assert honest[name].failure is None
    assert honest[name].rewards == {"passed": 1.0}
    assert honest[name].metrics == {"is_sandboxed": 1.0, "returned_object": 0.0}


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        ("def double(x): return x", DOUBLE, 0.0),
        ("def double(x)", DOUBLE, 0.0),
        ("def triple(x): return 3 * x", DOUBLE, 0.0),
        ("def double(x): raise ValueError", DOUBLE, 0.0),
        ("print(int(input()) * 2)", [{"input": "3", "output": "6"}, {"input": "4", "output": "9"}], 0.5),
    ],
    ids=["wrong", "no Python", "another function", "raises", "one of two runs"],
)
def test_a_wrong_program_earns_the_share_that_it_passes(program: str, tests: Any, passed: float) -> None:
    assert reward(program, tests) == passed


def test_a_response_without_a_program_earns_nothing() -> None:
    assert ask("code", turn("no idea", data={"tests": DOUBLE}))[0].rewards == {"passed": 0.0}


# Programs that deceive

TRICKS = sections("tricks")


@pytest.fixture(scope="module")
def tricked() -> dict[str, Feedback]:
    return dict(zip(TRICKS, judge_all((program, DOUBLE) for program in TRICKS.values()), strict=True))


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_earns_nothing(tricked: dict[str, Feedback], name: str) -> None:
    assert tricked[name].failure is None
    assert tricked[name].rewards == {"passed": 0.0}


def test_a_program_that_returns_an_object_is_counted() -> None:
    feedback = judge("def double(x): return lambda: x", DOUBLE)
    assert feedback.metrics["returned_object"] == 1.0


def test_a_function_that_ends_an_iteration_does_not_end_the_test() -> None:
    program = "def is_right(x): raise StopIteration"
    assert reward(program, "assert all(map(is_right, [1, 2]))\nassert all(is_right(x) for x in [1])") == 0.0


def test_a_nan_is_not_close_to_what_is_expected() -> None:
    assert reward("def half(x): return float('nan')", "assert abs(half(1) - 0.5) < 1e-6") == 0.0


def test_changing_the_arguments_does_not_change_what_is_expected() -> None:
    program = "def total(xs):\n    xs.clear()\n    return 0"
    assert reward(program, "xs = [1, 2]\nassert total(xs) == sum(xs)") == 0.0


ENDLESS = sections("endless")


@pytest.fixture(scope="module")
def ended() -> dict[str, Feedback]:
    pairs = ((program, "for _ in range(double(3)): pass") for program in ENDLESS.values())
    return dict(zip(ENDLESS, judge_all(pairs, timeout_s=1.0), strict=True))


@pytest.mark.parametrize("name", ENDLESS)
def test_a_program_that_does_not_end_earns_nothing_when_its_time_is_over(
    ended: dict[str, Feedback], name: str
) -> None:
    assert ended[name].failure is None
    assert ended[name].rewards == {"passed": 0.0}


# It has 16 processes that compute for as long as they may.
SPINS = "import os\nfor _ in range(15):\n    if os.fork() == 0: break\nwhile True: pass"
COMPUTES = "import time\nwhile time.process_time() < 0.4: pass\ndef double(x): return 2 * x\nprint(5)"


@pytest.mark.parametrize("tests", [[{"input": "", "output": "5"}], DOUBLE], ids=["printed", "called"])
def test_a_program_loses_nothing_to_one_that_takes_the_cpus(tests: Any) -> None:
    spinning, honest = judge_all([(SPINS, tests), (COMPUTES, tests)], timeout_s=1.0, max_parallel=2)
    assert (spinning.failure, spinning.rewards) == (None, {"passed": 0.0})
    assert (honest.failure, honest.rewards) == (None, {"passed": 1.0})


def test_a_program_that_gets_no_cpu_fails_its_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    always = Look(cpu_s=0.0, is_waiting=True)
    monkeypatch.setattr(
        "nemo_like.environments.time_limit.ProcessTrees", lambda roots: Mock(look=lambda: always)
    )
    # Its start alone would use up half a second where the machine is slow.
    monkeypatch.setattr(ControlGroup, "cpu_s", lambda group: 0.0)
    feedback = judge(ENDLESS["sleeps"], DOUBLE, timeout_s=0.5)
    assert feedback.failure is not None and feedback.failure.kind is FailureKind.timed_out
    assert "neither ended nor used up options.timeout_s=0.5 s: it had" in feedback.failure.reason


@pytest.mark.parametrize(
    ("printed", "passed"),
    [("1\\n2\\n\\n", 1.0), ("1 \\r\\n2\\t", 1.0), ("1\\x0c2", 0.0), ("1\\x852", 0.0), ("1\\n2\\x0c", 0.0)],
)
def test_only_an_end_of_a_line_is_one(printed: str, passed: float) -> None:
    program = f"import sys\nsys.stdout.write('{printed}')"
    assert reward(program, [{"input": "", "output": "1\n2"}]) == passed


OUTPUT_TRICKS = sections("output_tricks")


def test_a_trick_with_the_output_earns_nothing() -> None:
    tests = [{"input": "3", "output": "6"}]
    feedback = judge_all((program, tests) for program in OUTPUT_TRICKS.values())
    assert [item.rewards for item in feedback] == [{"passed": 0.0}] * len(OUTPUT_TRICKS)


@pytest.mark.parametrize(
    "program",
    [OUTPUT_TRICKS["deep folders"], "import shutil, os\nshutil.rmtree(os.getcwd())", ENDLESS["sleeps"]],
    ids=["deep folders", "removes its folder", "does not end"],
)
def test_without_a_sandbox_nothing_is_left_either(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert reward(program, DOUBLE, sandbox="none", timeout_s=3.0) == 0.0
    # The process that runs the tests has a folder of its own, empty, until the environment is gone.
    assert len(list(tmp_path.iterdir())) <= 1


# Tests that need more than values

REFUSED = sections("refused")


@pytest.fixture(scope="module", params=["raise SystemExit", "def make(*a): return 1\nyear = double = make"])
def refused(request: pytest.FixtureRequest) -> dict[str, Feedback]:
    return dict(zip(REFUSED, judge_all((request.param, tests) for tests in REFUSED.values()), strict=True))


@pytest.mark.parametrize("reason", REFUSED)
def test_tests_that_values_do_not_suffice_for_are_refused_by_name(
    refused: dict[str, Feedback], reason: str
) -> None:
    failure = refused[reason].failure
    assert failure is not None
    assert failure.kind is FailureKind.raised
    assert f"these tests cannot be run by value: {reason}" in failure.reason
    assert "options.share_objects=true" in failure.reason


# Tests in the program's own process

STACK = "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
SHARED_TESTS = "s = Stack()\ns.push(3)\nassert isinstance(s, Stack) and s.items == [3]"


def test_with_shared_objects_classes_are_tested() -> None:
    assert reward(STACK, SHARED_TESTS, share_objects=True) == 1.0
    assert reward(STACK.replace("append(x)", "clear()"), SHARED_TESTS, share_objects=True) == 0.0


def test_with_shared_objects_ending_early_still_earns_nothing_but_deceiving_the_tests_does() -> None:
    early = [program for name, program in TRICKS.items() if "exit" in name or "another program" in name]
    assert len(early) >= 6
    feedback = judge_all(((program, DOUBLE) for program in early), share_objects=True)
    assert {item.rewards["passed"] for item in feedback} == {0.0}
    assert reward(TRICKS["equal to everything"], DOUBLE, share_objects=True) == 1.0


def test_a_child_that_left_and_keeps_the_output_open_holds_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing may make control groups, such a child cannot be found."""
    monkeypatch.setattr(cpu_account, "_delegated", lambda: None)
    leaves_one = "import os, time\nif os.fork() == 0:\n    os.setsid()\n    time.sleep(30)\nprint(3)"
    tests = [{"input": "", "output": "3"}]
    assert reward(leaves_one, tests, sandbox="none", timeout_s=1.0) == 0.0
