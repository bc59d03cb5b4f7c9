"""A fixed sequence of tokens that trainer and engines both score, and a limit on the difference of their
scores.

The tokens look random, so most of them are improbable: a wrong weight changes their log-probs more than the
log-probs of sampled tokens. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nemo_like.policy.options import Device, Precision, WorkerGroupConfig
from nemo_like.tripwires.alarm import Alarm

_NUM_TOKENS = 32
# Nats per token, mean of |engine - trainer|; healthy runs in float32 on the CPU have at most 2e-6.
_LIMITS = {(Device.cpu, Precision.float32): 2e-5}
_LIMIT_ELSEWHERE = 0.2


def canary_tokens(vocab_size: int, max_tokens: int) -> tuple[int, ...]:
    """Return up to 32 token ids, at most ``max_tokens``; they depend on the vocabulary's size alone."""
    state, tokens = 1, []
    for _ in range(min(_NUM_TOKENS, max_tokens)):
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64  # Knuth's MMIX generator
        tokens.append((state >> 33) % vocab_size)
    return tuple(tokens)


def canary_gap(trainer: Sequence[float], engines: Sequence[Sequence[float]]) -> float:
    """Return how far the worst engine is from the trainer: the mean of |engine - trainer| over the tokens,
    nats.

    Each sequence has the log-probs of all tokens but the first. NaN counts as infinite.
    """
    gaps = [
        sum(abs(one - other) for one, other in zip(engine, trainer, strict=True)) / len(trainer)
        for engine in engines
    ]
    return math.inf if any(math.isnan(gap) for gap in gaps) else max(gaps)


def canary_limit(cfg: WorkerGroupConfig) -> float:
    """Return how far log-probs of the same tokens may be apart by rounding alone, nats per token."""
    return _LIMITS.get((cfg.device, cfg.precision), _LIMIT_ELSEWHERE)


def canary_alarms(gap: float | None, cfg: WorkerGroupConfig, *, has_experts: bool) -> Iterator[Alarm]:
    """Yield an alarm when engines and trainer score the canary differently; ``gap`` is None if it was not
    measured."""
    where = (cfg.device, cfg.precision)
    limit = canary_limit(cfg)
    if gap is not None and not gap <= limit:
        yield Alarm(
            tripwire="canary",
            wrong=(
                f"an engine's log-probs of fixed tokens differ from the trainer's by {gap:.3g} nats per "
                f"token, over {limit:g} ({cfg.precision.name} on {cfg.device.name})"
            ),
            look_at="conversion and loading of weights, two versions of the model's code "
            "(docs/explanation/disagreement.md)",
            ends_run=where in _LIMITS and not has_experts,
        )
