"""Simulates a run: engines, rollouts and the trainer, which overlap as the driver lets them.

    for each step s:
        bring the weights of version s - 1 to the engines ── they drain, or pause
        begin the rollouts of steps s .. s + max_staleness, but of none after a checkpoint
        wait for the groups of step s; score, train     ── with exact overlap, as they end
        validate, save, where that is due

Deterministic: one workload and one mode give one result.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.rollout.prompts import WantedGroups, newest_under_way
from nemo_like.rollout.token_allowance import TokenAllowance
from nemo_like_tools.what_if.clock import Clock, Process, Signal
from nemo_like_tools.what_if.engine import SampledTokens, SimulatedEngine
from nemo_like_tools.what_if.workload import (
    EngineSpeed,
    GroupWork,
    Mode,
    Pauses,
    SampleWork,
    Simulated,
    Split,
    StepWork,
    TrainerSpeed,
)


class Simulation:
    """One run, whose steps do the work of ``works`` in turn."""

    def __init__(
        self,
        works: Sequence[StepWork],
        engine: EngineSpeed,
        trainer: TrainerSpeed,
        *,
        mode: Mode,
        split: Split,
        pauses: Pauses | None = None,
    ) -> None:
        self._works, self._trainer, self._mode = works, trainer, mode
        self._pauses = pauses or Pauses()
        self._clock = Clock()
        self._sampled = SampledTokens()
        self._engines = [
            SimulatedEngine(self._clock, engine, mode, self._sampled) for _ in range(split.num_engines)
        ]
        self._num_replicas = split.num_replicas
        self._compute_scale = trainer.num_replicas / split.num_replicas
        self._rollouts: dict[int, _Rollout] = {}
        self._num_begun = 0
        self._trainer_busy_s = 0.0
        self._ends_s: list[float] = []
        self._engines_busy_s: list[float] = []

    def run(self, num_steps: int) -> Simulated:
        """Make ``num_steps`` steps. Rollouts run ahead even of the last step, as in a longer run."""
        self._clock.start(self._drive(num_steps))
        self._clock.run()
        if len(self._ends_s) < num_steps:
            raise RuntimeError(f"the simulated run stopped after {len(self._ends_s)} of {num_steps} steps")
        return self._simulated(num_steps)

    def _simulated(self, num_steps: int) -> Simulated:
        total_s = self._ends_s[-1]
        num_first = min(self._mode.max_staleness + 1, num_steps - 1)
        begin_s = self._ends_s[num_first - 1] if num_first else 0.0
        tokens = self._sampled.by_staleness
        num_tokens = sum(tokens.values())
        wasted = sum(self._work(step).wasted_share for step in range(1, num_steps + 1)) / num_steps
        return Simulated(
            num_steps=num_steps,
            total_s=total_s,
            step_s=(total_s - begin_s) / (num_steps - num_first),
            engine_idle_share=1.0 - sum(self._engines_busy_s) / (len(self._engines) * total_s),
            trainer_idle_share=1.0 - self._trainer_busy_s / total_s,
            mean_staleness=sum(age * n for age, n in tokens.items()) / num_tokens if num_tokens else 0.0,
            max_staleness=max(tokens, default=0),
            wasted_share=wasted,
            ends_s=tuple(self._ends_s),
        )

    def _work(self, step: int) -> StepWork:
        return self._works[(step - 1) % len(self._works)]

    def _drive(self, num_steps: int) -> Process:
        for step in range(1, num_steps + 1):
            yield from self._bring_weights(step - 1)
            for under_way in self._rollouts.values():
                under_way.begin_step(step)
            newest = newest_under_way(step, self._mode.max_staleness, self._pauses.saves_after)
            while self._num_begun < newest:
                self._num_begun += 1
                self._begin(self._num_begun, step)
            rollout = self._rollouts.pop(step)
            if self._mode.is_exact_overlap:
                yield from self._train_part_by_part(self._work(step), rollout)
            else:
                yield from self._train_at_the_end(self._work(step), rollout)
            yield self._work(step).driver_s
            if self._pauses.validates_after(step):
                yield from self._bring_weights(step)
                yield self._trainer.validation_s
            if self._pauses.saves_after(step):
                yield self._trainer.checkpoint_s
            self._ends_s.append(self._clock.now_s)
        # Rollouts that run ahead go on, but no longer count.
        self._engines_busy_s = [engine.busy_s for engine in self._engines]

    def _bring_weights(self, version: int) -> Process:
        """Pause all engines, transfer the weights of ``version`` and resume; the trainer waits throughout."""
        if version and self._engines[0].version == version:
            return
        paused = [Signal() for _ in self._engines]
        for engine, signal in zip(self._engines, paused, strict=True):
            engine.pause(signal.fire)
        for signal in paused:
            yield signal
        yield self._trainer.weight_sync_s
        self._trainer_busy_s += self._trainer.weight_sync_s
        if self._mode.max_staleness and self._mode.weight_updates is WeightUpdates.in_flight:
            yield self._trainer.recompute_s
        for engine in self._engines:
            engine.resume(version)

    def _begin(self, step: int, begun_in: int) -> None:
        allowance = TokenAllowance(self._mode.max_tokens_per_step, begun_in=begun_in, step=step)
        rollout = _Rollout(step, self._work(step), self._engines, self._clock, allowance)
        self._rollouts[step] = rollout
        self._clock.start(rollout.begin())

    def _train_at_the_end(self, work: StepWork, rollout: _Rollout) -> Process:
        while not rollout.is_over:
            yield from rollout.next_part(len(work.groups))
        yield work.put_s
        compute_s = (work.scoring_s + work.training_s) * self._compute_scale
        self._trainer_busy_s += compute_s
        yield compute_s + work.calls_s

    def _train_part_by_part(self, work: StepWork, rollout: _Rollout) -> Process:
        """Score groups and accumulate their gradients as they end; then make the first update and the
        rest."""
        scoring_s, training_s = (
            seconds * self._compute_scale for seconds in (work.scoring_s, work.training_s)
        )
        update_s = training_s / self._trainer.updates_per_step
        gradient_s = update_s * (1.0 - self._trainer.optimizer_share)
        num_tokens = sum(group.num_tokens for group in work.groups)
        ready: list[GroupWork] = []
        while ready or not rollout.is_over:
            if not rollout.is_over:
                ready += yield from rollout.next_part(self._num_replicas)
            # Every replica gets equally many groups; only the rest at the end may be uneven.
            count = len(ready) // self._num_replicas * self._num_replicas
            if not count and rollout.is_over:
                count = len(ready)
            part, ready = ready[:count], ready[count:]
            if part:
                share = sum(group.num_tokens for group in part) / num_tokens
                compute_s = share * (scoring_s + gradient_s)
                self._trainer_busy_s += compute_s
                yield share * work.put_s + work.calls_s + compute_s
        rest_s = training_s - gradient_s
        self._trainer_busy_s += rest_s
        yield rest_s + work.calls_s / self._trainer.num_stage_calls


class _Rollout:
    """The rollouts of one step. Each begins when all groups of the previous one were taken."""

    def __init__(
        self,
        step: int,
        work: StepWork,
        engines: Sequence[SimulatedEngine],
        clock: Clock,
        allowance: TokenAllowance,
    ) -> None:
        self.step, self._work, self._engines, self._clock = step, work, engines, clock
        self.allowance = allowance
        self.next_step = Signal()  # a step has begun, which may grant more tokens
        self._latest = 0  # index of the latest rollout: 0 is the first, others are refills
        self._ended: list[GroupWork] = []  # groups of the latest rollout, in the order in which they ended
        self._num_taken = 0  # how many of ``_ended`` were taken
        self._next_end = Signal()

    @property
    def is_over(self) -> bool:
        """Whether every group of every rollout was taken."""
        return self._latest == len(self._work.rollouts) - 1 and self._num_taken == self._num_groups

    def begin(self) -> Process:
        """Begin the conversations of the first rollout, after the work that precedes them."""
        yield self._work.begin_s
        self._begin_latest()

    def begin_step(self, step: int) -> None:
        self.allowance.begin_step(step)
        signal, self.next_step = self.next_step, Signal()
        signal.fire()

    def next_part(self, at_least: int) -> Generator[float | Signal, None, list[GroupWork]]:
        """Wait for groups as the driver does, and return them. A refill begins once a step asks for it."""
        if self._num_taken == self._num_groups:
            self._latest, self._ended, self._num_taken = self._latest + 1, [], 0
            self._begin_latest()
        wanted = WantedGroups(at_least).num_ended(self._num_taken, self._num_groups)
        while len(self._ended) < wanted:
            yield self._next_end
        part, self._num_taken = self._ended[self._num_taken :], len(self._ended)
        return part

    def group_ended(self, group: GroupWork) -> None:
        self._ended.append(group)
        signal, self._next_end = self._next_end, Signal()
        signal.fire()

    def _begin_latest(self) -> None:
        for position, group in enumerate(self._work.rollouts[self._latest]):
            _HeldGroup(self, group, self._engines[position % len(self._engines)]).begin()

    @property
    def _num_groups(self) -> int:
        return len(self._work.rollouts[self._latest])

    def start(self, process: Process) -> None:
        self._clock.start(process)


class _HeldGroup:
    """A group whose samples one engine answers."""

    def __init__(self, rollout: _Rollout, group: GroupWork, engine: SimulatedEngine) -> None:
        self._rollout, self._group, self._engine = rollout, group, engine
        self._num_left = len(group.samples)

    def begin(self) -> None:
        if self._group.is_one_request:
            piece = self._rollout.allowance.next_piece(0)
            lengths = [sample.turns[0].num_tokens for sample in self._group.samples]
            firsts = lengths if piece is None else [min(length, piece) for length in lengths]
            self._engine.submit(self._rollout.step, firsts, partial(self._end_all, firsts))
        else:
            for sample in self._group.samples:
                self._rollout.start(self._hold(sample))

    def _end_all(self, lengths: Sequence[int]) -> None:
        """Continue all samples after the first request, which gave each sample ``lengths`` tokens."""
        for sample, length in zip(self._group.samples, lengths, strict=True):
            self._rollout.start(self._hold(sample, length))

    def _hold(self, sample: SampleWork, num_given: int = 0) -> Process:
        """Hold a sample's conversation to its end. Its first turn has ``num_given`` tokens already."""
        num_tokens = num_given
        for turn in sample.turns:
            left = turn.num_tokens - num_given
            while left > 0:
                while self._rollout.allowance.is_spent(num_tokens):
                    yield self._rollout.next_step
                size = min(left, self._rollout.allowance.next_piece(num_tokens) or left)
                came = Signal()
                self._engine.submit(self._rollout.step, [size], came.fire)
                yield came
                left, num_tokens = left - size, num_tokens + size
            yield turn.judge_s
            num_given = 0
        self._sample_ended()

    def _sample_ended(self) -> None:
        self._num_left -= 1
        if not self._num_left:
            self._rollout.group_ended(self._group)
