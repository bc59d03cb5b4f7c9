"""Checks the keys that name a metric."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.plan.reported_metrics import training_metrics, validation_metrics


def metric_problems(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for every key that names a metric which no step of this run would report."""
    if cfg.checkpointing.enabled and (name := cfg.checkpointing.metric_name) is not None:
        known = [*validation_metrics(cfg), *training_metrics(cfg)]
        yield from _unknown(f"checkpointing.metric_name={name}", name, known, "run")
    if cfg.grpo.val_stop_threshold is not None:
        name = cfg.grpo.val_stop_metric
        yield from _unknown(f"grpo.val_stop_metric={name}", name, validation_metrics(cfg), "run's validation")


def _unknown(key: str, name: str, known: list[str], reporter: str) -> Iterator[Problem]:
    if name in known or any(name.startswith(prefix) for prefix in known if prefix.endswith("/")):
        return
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    remedy = f"did you mean {close[0]}?" if close else f"there are {', '.join(known[:4])}, ..."
    yield Problem(key=key, rule=f"is no metric of this {reporter} (docs/reference/metrics.md)", remedy=remedy)
