"""The learning-rate schedule, counted in optimizer updates. Standard library only.

No library's schedule is used. Megatron-core's ``OptimizerParamScheduler`` gives the same rates to the bit,
but importing it costs every FSDP worker 1.5 s of CPU and 76 MiB. The schedules of torch and transformers keep
a state and differ in at least a third of the rates.
"""

from __future__ import annotations

import math

from nemo_like.policy.options import LRDecayStyle, SchedulerConfig


def learning_rate(update: int, peak: float, cfg: SchedulerConfig) -> float:
    """Return the learning rate of update number ``update``, counted from 1.

    During warm-up the rate is peak * update / warmup_updates. Then it falls from the peak at
    ``warmup_updates`` to ``min_lr`` at ``decay_updates``, in the configured shape, and stays there; with
    ``constant`` it stays at the peak.
    """
    if update <= cfg.warmup_updates:
        return peak * update / cfg.warmup_updates
    if cfg.decay_style is LRDecayStyle.constant:
        return peak
    span = cfg.decay_updates - cfg.warmup_updates
    progress = min(1.0, (update - cfg.warmup_updates) / span) if span > 0 else 1.0
    remaining = (
        1 - progress if cfg.decay_style is LRDecayStyle.linear else (1 + math.cos(math.pi * progress)) / 2
    )
    return cfg.min_lr + (peak - cfg.min_lr) * remaining
