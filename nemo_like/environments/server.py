"""The process that hosts an environment: it keeps deadlines, and one bad reward costs one sample.

A batch of turns is first asked for as a whole. Only when that raises, hangs or answers nonsense is
each turn asked for again alone, on a thread of its own with a fresh environment, so that the guilty
samples, and no others, are marked as failed with the reason.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence

from nemo_like.config.schema import EnvConfig, EnvironmentKind
from nemo_like.environments.arithmetic import ArithmeticEnvironment
from nemo_like.environments.interface import Environment, Feedback, Turn

# Turns asked for alone at the same time; each needs a thread.
_MAX_LANES = 64

_ENVIRONMENTS: dict[EnvironmentKind, Callable[[], Environment]] = {
    EnvironmentKind.arithmetic: ArithmeticEnvironment,
}


def build_environment(cfg: EnvConfig) -> Environment:
    """The environment that ``env.kind`` names."""
    return _ENVIRONMENTS[cfg.kind]()


class EnvironmentServer:
    """Target of an asyncio actor: calls interleave, and none can block another beyond ``timeout_s``."""

    def __init__(self, cfg: EnvConfig, factory: Callable[[], Environment] | None = None) -> None:
        """``factory`` replaces the environment that ``cfg.kind`` names, for one that has no kind."""
        self._timeout_s = cfg.timeout_s
        self._factory = factory or (lambda: build_environment(cfg))
        self._lane = _Lane(self._factory)
        self._alone = asyncio.Semaphore(_MAX_LANES)

    async def step(self, turns: Sequence[Turn]) -> list[Feedback]:
        """One feedback per turn, in order; never raises because of a turn.

        A turn whose reward raises, takes longer than ``env.timeout_s`` or is not a finite number has
        its ``failure`` set.
        """
        lane = self._lane
        try:
            feedback = await lane.step(turns, self._timeout_s)
        except TimeoutError:
            # The thread may be stuck for good: leave it behind, and let later calls have a new one.
            if self._lane is lane:
                self._lane = _Lane(self._factory)
            lane.close()
            return await self._ask_each_alone(turns)
        except Exception:
            return await self._ask_each_alone(turns)
        return [_checked(item) for item in feedback]

    async def _ask_each_alone(self, turns: Sequence[Turn]) -> list[Feedback]:
        return list(await asyncio.gather(*(self._ask_alone(turn) for turn in turns)))

    async def _ask_alone(self, turn: Turn) -> Feedback:
        async with self._alone:
            lane = _Lane(self._factory)
            try:
                (feedback,) = await lane.step([turn], self._timeout_s)
            except TimeoutError:
                return Feedback.failed(f"the reward took longer than env.timeout_s={self._timeout_s:g} s")
            except Exception as error:
                return Feedback.failed(f"the reward raised {type(error).__name__}: {error}")
            finally:
                lane.close()
            return _checked(feedback)


class _Lane:
    """An environment on an event loop and a daemon thread of its own, so that it can block nobody else."""

    def __init__(self, factory: Callable[[], Environment]) -> None:
        self._environment = factory()
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._is_closed = False
        threading.Thread(target=self._run, name="environment", daemon=True).start()

    async def step(self, turns: Sequence[Turn], timeout_s: float) -> Sequence[Feedback]:
        """Raises TimeoutError on expiry, RuntimeError when the lane is closed meanwhile, ValueError on a
        wrong number of answers, or what the environment raised."""
        pending = asyncio.run_coroutine_threadsafe(_answer(self._environment, turns), self._loop)
        done, _ = await asyncio.wait([asyncio.wrap_future(pending)], timeout=timeout_s)
        if not done:
            pending.cancel()
            raise TimeoutError
        answer = done.pop()
        if answer.cancelled():
            raise RuntimeError("the environment was replaced, since another call made it hang")
        feedback = answer.result()
        if len(feedback) != len(turns):
            raise ValueError(f"the environment gave {len(feedback)} answers to {len(turns)} turns")
        return feedback

    def close(self) -> None:
        """End the thread as soon as it is not blocked, cancelling what it awaits; returns at once."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._closing.set)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(_wait_for(self._closing))


async def _answer(environment: Environment, turns: Sequence[Turn]) -> Sequence[Feedback]:
    return await environment.step(turns)


async def _wait_for(event: asyncio.Event) -> None:
    await event.wait()


def _checked(feedback: Feedback) -> Feedback:
    """The feedback itself, or a failed one when a component is not a finite number."""
    for name, value in feedback.rewards.items():
        if not math.isfinite(value):
            return Feedback.failed(f"the reward {name!r} is {value}")
    return feedback
