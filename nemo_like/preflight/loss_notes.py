"""Warns of what a run does that its user may not want, although no rule forbids it."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.loss_traits import is_own_loss
from nemo_like.configuration import Config


def staleness_notes(cfg: Config) -> Iterator[str]:
    """Yield a warning when samples of older weights train as if the present weights had sampled them."""
    loss = cfg.loss_fn
    is_corrected = loss.use_generation_logprobs_as_prev or loss.use_importance_sampling_correction
    if cfg.grpo.max_staleness > 0 and not (is_corrected or is_own_loss(loss)):
        yield (
            f"grpo.max_staleness={cfg.grpo.max_staleness}: samples of older weights train without a "
            "correction; loss_fn.use_importance_sampling_correction=true is recommended, with "
            "truncated_importance_sampling_type=tis and truncated_importance_sampling_ratio=2 "
            "(docs/explanation/async.md)"
        )
