"""``SimulatedEngine``: what an engine does with requests, by a speed that depends on how many sequences run.

All running sequences get their tokens at the same rate, so the engine counts tokens instead of seconds: a
sequence that begins at count c and has n tokens ends at c + n, however the rate changes in between.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.what_if.clock import Clock
from nemo_like.what_if.workload import EngineSpeed, Mode

_ROUNDING = 1e-9  # tokens


@dataclass(slots=True, eq=False)
class RunningSequence:
    """A response under way; ``num_left`` is what it lacks, as of its latest start."""

    step: int
    num_left: float
    on_end: Callable[[], None]
    began_at: float = 0.0  # the engine's count of tokens at its latest start
    ends_at: float = 0.0


@dataclass(slots=True)
class SampledTokens:
    """How many tokens were sampled by how old weights."""

    by_staleness: dict[int, float] = field(default_factory=dict)

    def add(self, staleness: int, num_tokens: float) -> None:
        if num_tokens > 0:
            self.by_staleness[staleness] = self.by_staleness.get(staleness, 0.0) + num_tokens


class SimulatedEngine:
    """Samples requests of earlier steps first, at most ``speed.max_num_seqs`` sequences at once."""

    def __init__(self, clock: Clock, speed: EngineSpeed, mode: Mode, sampled: SampledTokens) -> None:
        self._clock, self._speed, self._mode, self._sampled = clock, speed, mode, sampled
        self._waiting: list[
            tuple[int, int, tuple[RunningSequence, ...]]
        ] = []  # by step, then in order of coming
        self._numbers = count()
        self._starting = 0  # sequences whose request has not got its first token
        self._running: list[
            tuple[float, int, RunningSequence]
        ] = []  # by the count of tokens at which they pause
        self._at = 0.0  # count of tokens of a sequence that has run from the beginning
        self._counted_s = 0.0  # when that was
        self._alarm = 0  # only the latest alarm counts
        self._versions: list[tuple[float, int]] = [(0.0, 0)]  # from which count on which version samples
        self._wants_pause: Callable[[], None] | None = None
        self._is_paused = False
        self.busy_s = 0.0

    @property
    def version(self) -> int:
        """The policy version of the weights."""
        return self._versions[-1][1]

    def submit(self, step: int, lengths: list[int], on_end: Callable[[], None]) -> None:
        """Sample responses of these lengths, in tokens, and call ``on_end`` when the last one has ended."""
        num_left = len(lengths)

        def ended() -> None:
            nonlocal num_left
            num_left -= 1
            if not num_left:
                on_end()

        sequences = tuple(RunningSequence(step, length, ended) for length in lengths)
        self._enqueue(step, sequences)
        self._go_on()

    def pause(self, then: Callable[[], None]) -> None:
        """Call ``then`` once the engine may take weights, and decode nothing until ``resume``."""
        self._wants_pause = then
        self._go_on()

    def resume(self, version: int) -> None:
        """Go on with the weights of ``version``."""
        self._count()
        self._is_paused = False
        self._versions.append((self._at, version))
        self._go_on()

    def _enqueue(self, step: int, sequences: tuple[RunningSequence, ...]) -> None:
        heapq.heappush(self._waiting, (step, next(self._numbers), sequences))

    def _go_on(self) -> None:
        """Grant a pause, or let in what there is room for; then wait for the next sequence to end."""
        self._count()
        if self._wants_pause is not None:
            is_in_flight = self._mode.weight_updates is WeightUpdates.in_flight
            if is_in_flight or not (self._running or self._starting):
                then, self._wants_pause = self._wants_pause, None
                self._is_paused = True
                self._clock.after(0.0, then)
        elif not self._is_paused:
            self._let_in()
        self._set_alarm()

    def _let_in(self) -> None:
        while self._waiting:
            _, _, sequences = self._waiting[0]
            num_there = self._starting + len(self._running)
            if num_there and num_there + len(sequences) > self._speed.max_num_seqs:
                return
            heapq.heappop(self._waiting)
            self._starting += len(sequences)
            self._clock.after(self._speed.request_s, partial(self._begin, sequences))

    def _begin(self, sequences: tuple[RunningSequence, ...]) -> None:
        self._count()
        self._starting -= len(sequences)
        for sequence in sequences:
            self._run(sequence)
        self._go_on()

    def _run(self, sequence: RunningSequence) -> None:
        """Run a sequence to its end."""
        sequence.began_at, sequence.ends_at = self._at, self._at + sequence.num_left
        heapq.heappush(self._running, (sequence.ends_at, next(self._numbers), sequence))

    def _count(self) -> None:
        """Bring the count of tokens, and the seconds in which some were sampled, up to now."""
        passed_s = self._clock.now_s - self._counted_s
        self._counted_s = self._clock.now_s
        if passed_s and self._running and not self._is_paused:
            self._at += passed_s / self._speed.token_time_s(len(self._running))
        if passed_s and (self._running or self._starting) and not self._is_paused:
            self.busy_s += passed_s

    def _set_alarm(self) -> None:
        self._alarm += 1
        if self._running and not self._is_paused:
            left = max(0.0, self._running[0][0] - self._at)
            seconds = left * self._speed.token_time_s(len(self._running))
            self._clock.after(seconds, partial(self._on_alarm, self._alarm))

    def _on_alarm(self, number: int) -> None:
        if number != self._alarm:
            return
        self._count()
        self._at = max(self._at, self._running[0][0])
        ended: list[RunningSequence] = []
        while self._running and self._running[0][0] <= self._at + _ROUNDING:
            _, _, sequence = heapq.heappop(self._running)
            self._note_tokens(sequence)
            ended.append(sequence)
        self._go_on()
        for sequence in ended:
            sequence.on_end()

    def _note_tokens(self, sequence: RunningSequence) -> None:
        """Note by which versions a sequence was sampled."""
        end = sequence.ends_at
        first = bisect_right(self._versions, sequence.began_at, key=lambda one: one[0]) - 1
        for place in range(first, len(self._versions)):
            start, version = self._versions[place]
            later = self._versions[place + 1][0] if place + 1 < len(self._versions) else end
            num_tokens = min(later, end) - max(start, sequence.began_at)
            self._sampled.add(sequence.step - 1 - version, num_tokens)
