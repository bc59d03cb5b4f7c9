"""The actor that hosts an environment: it keeps deadlines, and one bad reward costs one sample.

The environment is first asked about a batch of turns as a whole. When that raises, hangs, kills its process
or gives a wrong number of answers, it is asked about each turn alone, in fresh processes. So only the guilty
samples are marked as failed, with the reason. A process that hung is ended and replaced.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace

from nemo_like.batch.columnar import Columnar
from nemo_like.batch.columns import Column
from nemo_like.child_process.parent_side import CallRaised, ChildDied
from nemo_like.cluster.breakdown import breaking_down
from nemo_like.config.secrets import without_referred
from nemo_like.environments.environment_process import Worker, start_worker
from nemo_like.environments.feedback import checked
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import kind_of


class EnvironmentServer:
    """Answers a rollout's questions with one environment; an asyncio actor hosts it.

    A call takes at most 4 x ``timeout_s`` from when it gets a free slot, besides the start of processes. When
    more rewards hang than that allows, the call fails the rest, so that the rollout ends in time.
    """

    def __init__(self, name: str, cfg: EnvConfig) -> None:
        """Prepare the server of ``env.<name>``; nothing is started yet."""
        self._name, self._cfg = name, cfg
        self._worker: Worker | None = None
        self._starting = asyncio.Lock()
        self._slots = asyncio.Semaphore(cfg.max_concurrency)

    async def start(self) -> None:
        """Build the environment before the first call, in a separate process unless it is harmless.

        Raises RuntimeError when the environment cannot be built.
        """
        try:
            await self._shared_worker()
        except RuntimeError as error:
            raise RuntimeError(f"env.{self._name}: {error}") from error

    async def columns(self) -> tuple[Column, ...]:
        """Return the columns that the environment's feedback may bring.

        Raises RuntimeError when the environment cannot be built.
        """
        await self.start()
        return (await self._shared_worker()).columns

    async def close(self) -> None:
        """End the environment's process."""
        if self._worker is not None:
            await self._worker.close()

    async def step(self, turns: Sequence[Turn]) -> list[Feedback]:
        """Return one feedback per turn, in order; never raise because of a turn.

        ``failure`` is set for a turn whose reward raises, takes longer than ``env.<name>.timeout_s``, ends
        its process or is no proper ``Feedback``.
        """
        async with self._slots:
            with breaking_down():
                return await self._step(turns)

    async def _step(self, turns: Sequence[Turn]) -> list[Feedback]:
        try:
            worker = await self._shared_worker()
            answers = zip(await self._asked(turns), turns, strict=True)
            return Columnar(
                [
                    self._without_secrets(
                        checked(answer, worker.columns, len(turn.response_ids), turn.number)
                    )
                    for answer, turn in answers
                ]
            )
        except RuntimeError as error:
            reason = f"the environment's process could not be started again: {error}"
            failed = Feedback.failed(FailureKind.died, reason)
            return Columnar([replace(failed, turn_number=turn.number) for turn in turns])

    def _without_secrets(self, feedback: Feedback) -> Feedback:
        """Return feedback whose failure does not show values that the options take from environment
        variables."""
        if feedback.failure is None:
            return feedback
        reason = without_referred(feedback.failure.reason, self._cfg.options)
        return replace(feedback, failure=replace(feedback.failure, reason=reason))

    async def _asked(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Ask about all turns at once, and about each alone if that goes wrong.

        Raises RuntimeError when no process can be started.
        """
        worker = await self._shared_worker()
        try:
            return await worker.step(turns, self._cfg.timeout_s)
        except (CallRaised, ChildDied, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                # The process may be stuck for good. Other calls under way in it are asked again elsewhere.
                await worker.close()
            if len(turns) == 1 and (isinstance(error, CallRaised) or self._cfg.max_concurrency == 1):
                return [self._failed(error)]
            return await self._each_alone(turns)

    async def _shared_worker(self) -> Worker:
        async with self._starting:
            if self._worker is not None and not self._worker.is_alive:
                await self._worker.close()
                self._worker = None
            if self._worker is None:
                self._worker = await start_worker(self._cfg)
            return self._worker

    async def _each_alone(self, turns: Sequence[Turn]) -> list[Feedback]:
        """Ask about each turn alone: several processes take turns from one list for 2 x ``timeout_s``; the
        rest fails."""
        given_up = Feedback.failed(
            FailureKind.timed_out, "not judged: the rewards before it took too long, or hung"
        )
        feedback = [given_up] * len(turns)
        rest = iter(enumerate(turns))
        num_lanes = min(kind_of(self._cfg).max_processes, len(turns))
        await asyncio.gather(*(self._ask_alone(rest, feedback) for _ in range(num_lanes)))
        return feedback

    async def _ask_alone(self, rest: Iterator[tuple[int, Turn]], feedback: list[Feedback]) -> None:
        worker = await start_worker(self._cfg)
        now = asyncio.get_running_loop().time
        last_start_s = now() + 2 * self._cfg.timeout_s
        try:
            for index, turn in rest:
                if now() > last_start_s:
                    return
                if not worker.is_alive:
                    await worker.close()
                    worker = await start_worker(self._cfg)
                feedback[index] = await self._judged(worker, turn)
        finally:
            await worker.close()

    async def _judged(self, worker: Worker, turn: Turn) -> Feedback:
        try:
            (feedback,) = await worker.step([turn], self._cfg.timeout_s)
            return feedback
        except (CallRaised, ChildDied, TimeoutError) as error:
            if isinstance(error, TimeoutError):
                await worker.close()
            return self._failed(error)

    def _failed(self, error: Exception) -> Feedback:
        """Return the failed feedback for a turn that was asked about alone and ended with ``error``."""
        if isinstance(error, CallRaised):
            return Feedback.failed(FailureKind.raised, f"the reward raised {error}")
        if isinstance(error, ChildDied):
            return Feedback.failed(FailureKind.died, f"the reward ended its process ({error.how})")
        limit = f"env.{self._name}.timeout_s={self._cfg.timeout_s:g} s"
        return Feedback.failed(FailureKind.timed_out, f"the reward took longer than {limit}")
