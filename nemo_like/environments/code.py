"""Reward for programs that pass their tests."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Sequence
from typing import Any

from nemo_like.config.environment_options import CodeOptions, NetworkIsolation
from nemo_like.environments.answers import extract_answer
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.programs import ProgramLimits, network_wall, run_program

_log = logging.getLogger(__name__)


class CodeEnvironment:
    """Component ``passed``: the share of tests that the response's program passes.

    Tests are a program, run after the response's in one process (one test: it must exit with 0), or a
    list of ``{"input": ..., "output": ...}``, each a run whose output must be the same but for spaces
    at the ends of lines. Metric ``network_is_isolated``: whether programs had no network.
    """

    def __init__(self, options: CodeOptions) -> None:
        """Raises RuntimeError when util-linux lacks, or the network must be taken away and cannot."""
        missing = [name for name in ("prlimit", "setpriv") if shutil.which(name) is None]
        if missing:
            raise RuntimeError(f"kind=code needs {', '.join(missing)}; install util-linux")
        if not network_wall():
            message = "programs cannot be run without network here (unshare --net is not permitted)"
            if options.network is NetworkIsolation.required:
                raise RuntimeError(f"{message}; permit it, or set options.network=preferred")
            _log.warning("%s: they run with it", message)
        self._options = options
        self._limits = ProgramLimits(options.timeout_s, options.memory_mib)
        self._slots = asyncio.Semaphore(options.max_parallel)

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        return list(await asyncio.gather(*(self._judge(turn) for turn in turns)))

    async def _judge(self, turn: Turn) -> Feedback:
        program = extract_answer(turn.response, self._options.program_pattern)
        passed = [] if program is None else await self._passed(program, turn.data[self._options.tests_key])
        share = sum(passed) / len(passed) if passed else 0.0
        return Feedback({"passed": share}, metrics={"network_is_isolated": float(bool(network_wall()))})

    async def _passed(self, program: str, tests: Any) -> list[bool]:
        if isinstance(tests, str):
            return [await self._exits_well(f"{program}\n\n{tests}\n")]
        runs = (self._prints(program, str(test["input"]), str(test["output"])) for test in tests)
        return list(await asyncio.gather(*runs))

    async def _exits_well(self, source: str) -> bool:
        async with self._slots:
            return (await run_program(source, "", self._limits)).exit_code == 0

    async def _prints(self, source: str, stdin: str, expected: str) -> bool:
        async with self._slots:
            result = await run_program(source, stdin, self._limits)
        return result.exit_code == 0 and _lines(result.stdout) == _lines(expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
