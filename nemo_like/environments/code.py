"""The environment that rewards programs for passing their tests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from nemo_like.data.interface import TaskPrompt
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.kind import RecordCheck
from nemo_like.environments.kinds.code import CodeOptions
from nemo_like.environments.per_turn import extract_answer
from nemo_like.environments.programs import Harness, passes_beside, run_program
from nemo_like.environments.record_needs import NUM_PARSED, field_of
from nemo_like.environments.sandbox import ProgramLimits, Sandbox, check_sandbox
from nemo_like.environments.sandboxed.harness import TestOutcome
from nemo_like.environments.shared_options import SandboxMode
from nemo_like.environments.time_limit import Starved

_log = logging.getLogger(__name__)
_BLANKS = " \t"


class CodeEnvironment:
    """Rewards a response with the share of tests that its program passes, as the component ``passed``.

    Tests are either one test program that calls the response's functions and must reach its end, which counts
    as one test, or a list of ``{"input": ..., "output": ...}``. Each entry of a list is a run, whose output
    must be the same but for spaces at the ends of lines and empty lines at the end. Metrics:
    ``is_sandboxed``, and ``returned_object``, 1 when a function returned something else than plain data.
    """

    def __init__(self, options: CodeOptions) -> None:
        """Check the sandbox. Raises RuntimeError when the options require a sandbox that cannot be made."""
        limits = ProgramLimits(options.timeout_s, options.memory_mib, options.max_processes)
        is_real = options.sandbox is SandboxMode.required
        self._sandbox = Sandbox(limits, tuple(options.readable_paths), is_real)
        check_sandbox(self._sandbox)
        if not is_real:
            _log.warning("options.sandbox=none: programs can do whatever this user can")
        self._options = options
        self._harness = Harness(self._sandbox)
        self._slots = asyncio.Semaphore(options.max_parallel)

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Judge the turns side by side and return one feedback per turn, in order."""
        return list(await asyncio.gather(*(self._judge(turn) for turn in turns)))

    async def _judge(self, turn: Turn) -> Feedback:
        try:
            return await self._judged(turn)
        except Starved as error:
            limit = f"options.timeout_s={self._options.timeout_s:g} s"
            return Feedback.failed(
                FailureKind.timed_out,
                f"the program neither ended nor used up {limit}: {error}; run fewer at once "
                "(options.max_parallel, num_actors) or keep the CPUs free for them",
            )

    async def _judged(self, turn: Turn) -> Feedback:
        program = extract_answer(turn.response, self._options.program_pattern)
        tests = turn.data[self._options.tests_key]
        if program is None:
            return self._feedback(0.0)
        if isinstance(tests, str):
            return await self._called(program, tests)
        runs = (self._prints(program, str(test["input"]), str(test["output"])) for test in tests)
        passed = await asyncio.gather(*runs, return_exceptions=True)
        for each in passed:
            if isinstance(each, BaseException):
                raise each
        return self._feedback(passed.count(True) / len(passed) if passed else 0.0)

    async def _called(self, program: str, tests: str) -> Feedback:
        async with self._slots:
            if self._options.share_objects:
                return self._feedback(float(await passes_beside(program, tests, self._sandbox)))
            verdict = await self._harness.judge(program, tests)
        if verdict.outcome is TestOutcome.refused:
            reason = f"these tests cannot be run by value: {verdict.reason}"
            remedy = "change them, or set options.share_objects=true"
            return Feedback.failed(FailureKind.raised, f"{reason}; {remedy}")
        return self._feedback(float(verdict.outcome is TestOutcome.passed), verdict.returned is not None)

    async def _prints(self, source: str, stdin: str, expected: str) -> bool:
        async with self._slots:
            result = await run_program(source, stdin, self._sandbox)
        return result.exit_code == 0 and _lines(result.stdout) == _lines(expected)

    def _feedback(self, passed: float, returned_object: bool = False) -> Feedback:
        metrics = {"is_sandboxed": float(self._sandbox.is_real), "returned_object": float(returned_object)}
        return Feedback({"passed": passed}, metrics=metrics)


def _lines(text: str) -> list[str]:
    """Return the lines of an output. Only line feeds end a line; form feeds and other breaks of
    ``str.splitlines`` are part of it."""
    lines = [line.rstrip(_BLANKS) for line in text.replace("\r\n", "\n").split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def has_tests(options: CodeOptions) -> RecordCheck:
    from nemo_like.environments.sandboxed.called_functions import functions_called
    from nemo_like.environments.sandboxed.remote_program import RefusedTests

    num_parsed = 0

    def check(task_prompt: TaskPrompt) -> None:
        nonlocal num_parsed
        tests = field_of(task_prompt, options.tests_key, "options.tests_key")
        if not tests:
            raise ValueError(f"the field {options.tests_key!r} (options.tests_key) has no tests")
        if isinstance(tests, str) and not options.share_objects and num_parsed < NUM_PARSED:
            num_parsed += 1
            try:
                functions_called(tests)
            except RefusedTests as refused:
                raise ValueError(
                    f"the tests in the field {options.tests_key!r} cannot be run by value: {refused}; change "
                    "them, or set options.share_objects=true"
                ) from None

    return check
