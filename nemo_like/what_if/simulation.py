"""Simulates a run: engines, rollouts and the trainer, as the driver lets them overlap.

    for each step s:
        bring the weights of version s - 1 to the engines ── they drain, or pause
        begin the rollouts of steps s .. s + max_staleness, but of none after a checkpoint
        wait for the groups of step s; score, train     ── with exact overlap, as they end
        validate, save, where that is due

Deterministic: one workload and one mode give one result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.rollout.token_allowance import TokenAllowance
from nemo_like.what_if.clock import Clock, Process, Signal
from nemo_like.what_if.engine import SampledTokens, SimulatedEngine
from nemo_like.what_if.workload import (
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
    """One run of ``num_steps`` steps, which do the work of ``works`` in turn."""

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
        """Let the run make its steps; rollouts run ahead of the last one as of any other."""
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
            last = min(step + self._mode.max_staleness, self._pauses.next_saved(step))
            while self._num_begun < last:
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
        # What runs ahead goes on, but no longer counts.
        self._engines_busy_s = [engine.busy_s for engine in self._engines]

    def _bring_weights(self, version: int) -> Process:
        """Pause all engines, transfer, and let them go on; the trainer has to wait for all of it."""
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
        self._clock.start(rollout.hold())

    def _train_at_the_end(self, work: StepWork, rollout: _Rollout) -> Process:
        yield rollout.is_over
        yield work.put_s
        compute_s = (work.scoring_s + work.training_s) * self._compute_scale
        self._trainer_busy_s += compute_s
        yield compute_s + work.calls_s

    def _train_part_by_part(self, work: StepWork, rollout: _Rollout) -> Process:
        """Score groups and add up their gradients as they end; then make the update, and those after it."""
        scoring_s, training_s = (
            seconds * self._compute_scale for seconds in (work.scoring_s, work.training_s)
        )
        update_s = training_s / self._trainer.updates_per_step
        gradient_s = update_s * (1.0 - self._trainer.optimizer_share)
        num_tokens, num_taken, num_groups = (
            sum(group.num_tokens for group in work.groups),
            0,
            len(work.groups),
        )
        while num_taken < num_groups:
            yield from rollout.wait_for(min(num_taken + self._num_replicas, num_groups))
            part = rollout.ended[num_taken:]
            if len(rollout.ended) < num_groups:  # every replica gets equally many groups
                part = part[: len(part) // self._num_replicas * self._num_replicas]
            num_taken += len(part)
            share = sum(group.num_tokens for group in part) / num_tokens
            compute_s = share * (scoring_s + gradient_s)
            self._trainer_busy_s += compute_s
            yield share * work.put_s + work.calls_s + compute_s
        rest_s = training_s - gradient_s
        self._trainer_busy_s += rest_s
        yield rest_s + work.calls_s / self._trainer.num_stage_calls


class _Rollout:
    """The rollouts of one step, which follow each other."""

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
        self.is_over = Signal()
        self.ended: list[GroupWork] = []  # in the order in which they did
        self._next_end = Signal()

    def hold(self) -> Process:
        """Hold all conversations, rollout by rollout."""
        yield self._work.begin_s
        for groups in self._work.rollouts:
            all_ended = [Signal() for _ in groups]
            for position, group in enumerate(groups):
                engine = self._engines[position % len(self._engines)]
                _HeldGroup(self, group, engine, all_ended[position]).begin()
            yield from all_ended
        self.is_over.fire()

    def begin_step(self, step: int) -> None:
        self.allowance.begin_step(step)
        signal, self.next_step = self.next_step, Signal()
        signal.fire()

    def wait_for(self, num_ended: int) -> Process:
        """Wait until so many groups have ended."""
        while len(self.ended) < num_ended:
            yield self._next_end

    def group_ended(self, group: GroupWork) -> None:
        self.ended.append(group)
        signal, self._next_end = self._next_end, Signal()
        signal.fire()

    def start(self, process: Process) -> None:
        self._clock.start(process)


class _HeldGroup:
    """A group whose samples are under way on one engine."""

    def __init__(self, rollout: _Rollout, group: GroupWork, engine: SimulatedEngine, ended: Signal) -> None:
        self._rollout, self._group, self._engine, self._ended = rollout, group, engine, ended
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
        """Go on with all samples, of which the first request gave so many tokens each."""
        for sample, length in zip(self._group.samples, lengths, strict=True):
            self._rollout.start(self._hold(sample, length))

    def _hold(self, sample: SampleWork, num_given: int = 0) -> Process:
        """Hold a sample's conversation to its end; the first turn has ``num_given`` tokens already."""
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
            self._ended.fire()
