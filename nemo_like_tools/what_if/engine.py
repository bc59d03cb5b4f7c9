"""Simulates an engine whose speed depends on the number of running sequences.

All running sequences get their tokens at the same rate, so the engine counts tokens instead of seconds: a
sequence that begins at count c and has n tokens ends at c + n, however the rate changes in between.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from nemo_like.generation.engine_order import AddRequests, EngineSituation, GrantPause, LiveOrder
from nemo_like_tools.what_if.clock import Clock
from nemo_like_tools.what_if.workload import EngineSpeed, Mode

_ROUNDING = 1e-9  # tokens


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """Responses that were asked for together; ``num_left`` of them have not ended."""

    name: str
    step: int
    lengths: Sequence[int]  # tokens
    num_left: int
    on_end: Callable[[], None]
    digest: int = 0  # nothing compares it: no journal is repeated

    @property
    def num_responses(self) -> int:
        return len(self.lengths)


@dataclass(frozen=True, slots=True)
class RunningSequence:
    """A response that is being decoded, with the engine's counts of tokens at its beginning and its end."""

    request: SimulatedRequest
    began_at: float
    ends_at: float


@dataclass(slots=True)
class SampledTokens:
    """The number of sampled tokens by the staleness of the weights that sampled them."""

    by_staleness: dict[int, float] = field(default_factory=dict)

    def add(self, staleness: int, num_tokens: float) -> None:
        if num_tokens > 0:
            self.by_staleness[staleness] = self.by_staleness.get(staleness, 0.0) + num_tokens


class SimulatedEngine:
    """An engine in simulated time. ``LiveOrder`` decides, as in a real engine, what it does next."""

    def __init__(self, clock: Clock, speed: EngineSpeed, mode: Mode, sampled: SampledTokens) -> None:
        self._clock, self._speed, self._sampled = clock, speed, sampled
        self._order = LiveOrder(mode.weight_updates, speed.max_num_seqs)
        self._waiting: dict[str, SimulatedRequest] = {}
        self._under_way: dict[str, SimulatedRequest] = {}  # requests that the engine has begun
        self._numbers = count()
        self._starting = 0  # sequences of requests without a first token yet
        # A heap, sorted by the count of tokens at which sequences end.
        self._running: list[tuple[float, int, RunningSequence]] = []
        self._at = 0.0  # tokens of a sequence that would have run from the beginning
        self._counted_s = 0.0  # the time of ``_at``
        self._alarm = 0  # only the latest alarm counts
        self._versions: list[tuple[float, int]] = [(0.0, 0)]  # (count of tokens, version from there on)
        self._wants_pause: Callable[[], None] | None = None
        self._is_paused = False
        self.busy_s = 0.0

    @property
    def version(self) -> int:
        """The policy version of the weights."""
        return self._versions[-1][1]

    def submit(self, step: int, lengths: list[int], on_end: Callable[[], None]) -> None:
        """Sample responses of ``lengths`` tokens, and call ``on_end`` when the last of them has ended."""
        name = str(next(self._numbers))
        self._waiting[name] = SimulatedRequest(name, step, lengths, len(lengths), on_end)
        self._go_on()

    def pause(self, then: Callable[[], None]) -> None:
        """Call ``then`` once the engine may take weights; from then on decode nothing until ``resume``."""
        self._wants_pause = then
        self._go_on()

    def resume(self, version: int) -> None:
        """Go on with the weights of ``version``."""
        self._count()
        self._is_paused = False
        self._versions.append((self._at, version))
        self._go_on()

    def _go_on(self) -> None:
        """Take requests and grant a pause as ``LiveOrder`` says, then wait for the next sequence to end."""
        self._count()
        while True:
            match self._order.next(self._situation()):
                case AddRequests(names):
                    for name in names:
                        self._add(self._waiting.pop(name))
                case GrantPause():
                    assert self._wants_pause is not None
                    self._clock.after(0.0, self._wants_pause)
                    self._wants_pause, self._is_paused = None, True
                case _:
                    break
        self._set_alarm()

    def _situation(self) -> EngineSituation:
        return EngineSituation(
            num_steps=0,
            waiting=self._waiting,
            running=self._under_way,
            num_sequences=self._starting + len(self._running),
            to_abort=(),
            wants_pause_for=None if self._wants_pause is None else self.version + 1,
            is_paused=self._is_paused,
        )

    def _add(self, request: SimulatedRequest) -> None:
        self._under_way[request.name] = request
        self._starting += request.num_responses
        self._clock.after(self._speed.request_s, partial(self._begin, request))

    def _begin(self, request: SimulatedRequest) -> None:
        self._count()
        self._starting -= request.num_responses
        for length in request.lengths:
            sequence = RunningSequence(request, self._at, self._at + length)
            heapq.heappush(self._running, (sequence.ends_at, next(self._numbers), sequence))
        self._go_on()

    def _count(self) -> None:
        """Bring the count of tokens and the busy seconds up to the present time."""
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
        ended: list[SimulatedRequest] = []
        while self._running and self._running[0][0] <= self._at + _ROUNDING:
            _, _, sequence = heapq.heappop(self._running)
            self._note_tokens(sequence)
            sequence.request.num_left -= 1
            if not sequence.request.num_left:
                ended.append(self._under_way.pop(sequence.request.name))
        self._go_on()
        for request in ended:
            request.on_end()

    def _note_tokens(self, sequence: RunningSequence) -> None:
        """Add the tokens of an ended sequence to ``SampledTokens``, by the versions that sampled them."""
        end = sequence.ends_at
        first = bisect_right(self._versions, sequence.began_at, key=lambda one: one[0]) - 1
        for index in range(first, len(self._versions)):
            start, version = self._versions[index]
            later = self._versions[index + 1][0] if index + 1 < len(self._versions) else end
            num_tokens = min(later, end) - max(start, sequence.began_at)
            self._sampled.add(sequence.request.step - 1 - version, num_tokens)
