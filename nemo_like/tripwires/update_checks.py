"""Judges the numbers measured of the loss and of the optimizer's updates. Standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from nemo_like.algorithms.options import ClippedLossConfig
from nemo_like.policy.options import (
    Device,
    LRDecayStyle,
    OptimizerKind,
    Precision,
    SchedulerConfig,
    TrainedGroupConfig,
    WorkerGroupConfig,
)
from nemo_like.tripwires.alarm import Alarm
from nemo_like.tripwires.measured import Measured

# float32 against float64: healthy runs have at most 2e-6.
_GRADIENT_TOLERANCE = 1e-4
_LOSS_TOLERANCE = 1e-4
_RATE_TOLERANCE = 1e-6
_CLIP_TOLERANCE = 1e-5
_MOMENT_TOLERANCE = 1e-3
_MEANS = {
    OptimizerKind.adamw: "Adam's first moment",
    OptimizerKind.muon: "Muon's momentum, or Adam's first moment beside it,",
}
# Nats per token between the scoring of tokens and the first training pass on them, with the same weights.
_FIRST_GAP = {(Device.cpu, Precision.float32): 1e-4}
_FIRST_GAP_ELSEWHERE = 0.1
# The entropy's estimate from n samples has a standard error of about 2 / sqrt(n) nats; ten times that may be.
_ENTROPY_BASE, _ENTROPY_PER_ROOT = 0.1, 20.0


def loss_alarms(measured: Mapping[str, float]) -> Iterator[Alarm]:
    """Yield an alarm when the loss, or the gradient that training back-propagated, differs from what
    ``reference_loss`` computes from the formulas."""
    for name, what, limit in (
        (Measured.loss_gradient_error, "the loss's derivative by a log-prob", _GRADIENT_TOLERANCE),
        (Measured.loss_error, "the loss", _LOSS_TOLERANCE),
    ):
        error = measured.get(name, 0.0)
        if not error <= limit:
            yield Alarm(
                tripwire="loss",
                wrong=f"{what} differs from its formula by {error:.3g} of its size; {limit:g} is rounding",
                look_at="loss_fn, its masks, shares and signs (docs/explanation/losses.md, "
                "algorithms/losses.py), and "
                "what scales gradients",
            )


def ratio_alarms(metrics: Mapping[str, float], loss: ClippedLossConfig) -> Iterator[Alarm]:
    """Yield an alarm when the clipped ratios are not the ratios limited to the configured bounds."""
    for side, bound in (("min", 1 - loss.ratio_clip_min), ("max", 1 + loss.ratio_clip_max)):
        ratio, clipped = metrics.get(f"probs_ratio_{side}"), metrics.get(f"probs_ratio_clamped_{side}")
        if ratio is None or clipped is None:
            continue
        due = min(max(ratio, 1 - loss.ratio_clip_min), 1 + loss.ratio_clip_max)
        if not abs(clipped - due) <= _CLIP_TOLERANCE:
            yield Alarm(
                tripwire="clipping",
                wrong=(
                    f"probs_ratio_{side} is {ratio:.6g} and after clipping {clipped:.6g}, not {due:.6g}, "
                    f"with a bound of {bound:g}"
                ),
                look_at="loss_fn.ratio_clip_min and ratio_clip_max, and where the loss reads them",
            )


def first_ratio_alarms(measured: Mapping[str, float], cfg: WorkerGroupConfig) -> Iterator[Alarm]:
    """Yield an alarm when log-probs in the first update differ from prev_logprobs, which the same weights
    gave."""
    gap = measured.get(Measured.first_ratio_gap, 0.0)
    limit = _FIRST_GAP.get((cfg.device, cfg.precision), _FIRST_GAP_ELSEWHERE)
    if not gap <= limit:
        yield Alarm(
            tripwire="first_ratio",
            wrong=(
                f"in the first update log-probs differ from prev_logprobs by {gap:.3g} nats per token, over "
                f"{limit:g}, though the weights are the same"
            ),
            look_at="what differs between scoring and training: weights, micro-batches, dropout, columns",
            ends_run=(cfg.device, cfg.precision) in _FIRST_GAP,
        )


def first_reference_alarms(measured: Mapping[str, float], cfg: TrainedGroupConfig) -> Iterator[Alarm]:
    """Yield an alarm when, before the first update of a run, reference_logprobs are not prev_logprobs, though
    the reference's weights are the policy's.

    Adapters that were trained before are not in the reference, and its routers replay nothing.
    """
    gap = measured.get(Measured.reference_gap, 0.0)
    begins_trained = cfg.lora.enabled and cfg.lora.adapter_path is not None
    limit = _FIRST_GAP.get((cfg.device, cfg.precision), _FIRST_GAP_ELSEWHERE)
    if not (gap <= limit or begins_trained or cfg.megatron_cfg.router_replay):
        yield Alarm(
            tripwire="first_reference",
            wrong=(
                f"before the first update reference_logprobs differ from prev_logprobs by {gap:.3g} nats per "
                f"token, over {limit:g}, though both are of the checkpoint's weights"
            ),
            look_at="with which weights and temperature the reference scores "
            "(policy/backends/kept_weights.py, policy/backends/scoring_backend.py)",
            ends_run=(cfg.device, cfg.precision) in _FIRST_GAP,
        )


def entropy_alarms(metrics: Mapping[str, float], num_tokens: float) -> Iterator[Alarm]:
    """Yield an alarm when the exact entropy is negative, or far from the mean of -log p of the samples."""
    entropy, estimate = metrics.get("entropy"), metrics.get("approx_entropy")
    if entropy is None or estimate is None or not num_tokens:
        return
    allowed = _ENTROPY_BASE + _ENTROPY_PER_ROOT / math.sqrt(num_tokens)
    if not (entropy >= 0 and abs(entropy - estimate) <= allowed):
        yield Alarm(
            tripwire="entropy",
            wrong=(
                f"the entropy is {entropy:.4g} nats per token and its estimate from {num_tokens:g} sampled "
                f"tokens {estimate:.4g}; they may differ by {allowed:.3g}"
            ),
            look_at="of which logits the entropy is computed (algorithms/logprobs.py)",
        )


def token_entropy_alarms(measured: Mapping[str, float]) -> Iterator[Alarm]:
    """Yield an alarm when a token's entropy cannot be that of the distribution of its own log-prob."""
    if count := measured.get(Measured.num_odd_entropies):
        yield Alarm(
            tripwire="entropy",
            wrong=f"on a rank {count:g} tokens have an entropy that their own log-prob excludes",
            look_at="at which tokens, and of which logits, the entropy is computed (algorithms/logprobs.py)",
        )


def optimizer_alarms(
    measured: Mapping[str, float], cfg: TrainedGroupConfig, updates_before: float | None, planned: int
) -> Iterator[Alarm]:
    """Yield an alarm when learning rate, counts of updates or clipped gradients are not as configured.

    ``planned`` is the number of updates in a step, without those that float16 skips; ``updates_before`` is
    the schedule's count after the previous step, None in the first step of a process.
    """
    count = measured.get(Measured.num_updates)
    if count is None:
        return
    if updates_before is not None and count != updates_before + planned:
        yield Alarm(
            tripwire="update_count",
            wrong=f"{count - updates_before:g} updates were made, not {planned}",
            look_at="the schedule of updates (batch/sharding.py)",
        )
    if gap := measured.get(Measured.optimizer_step_gap, 0.0):
        yield Alarm(
            tripwire="update_count",
            wrong=f"the optimizer's own count of updates is {gap:g} from the schedule's {count:g}",
            look_at="what a checkpoint restores: optimizer state and the count of updates",
        )
    rate = measured[Measured.learning_rate]
    due = scheduled_rate(int(count), cfg.optimizer.lr, cfg.scheduler)
    if planned and not abs(rate - due) <= _RATE_TOLERANCE * cfg.optimizer.lr:
        yield Alarm(
            tripwire="learning_rate",
            wrong=f"the learning rate of update {count:g} is {rate:.6g}, and the schedule gives {due:.6g}",
            look_at="policy.scheduler, whose lengths count updates, and policy/backends/learning_rate.py",
        )
    excess = measured.get(Measured.moment_excess, 0.0)
    if not excess <= _MOMENT_TOLERANCE * cfg.max_grad_norm:
        yield Alarm(
            tripwire="gradient_clipping",
            wrong=(
                f"{_MEANS[cfg.optimizer.kind]} is {excess:.3g} longer than gradients clipped at "
                f"policy.max_grad_norm={cfg.max_grad_norm:g} can make it"
            ),
            look_at="whether the optimizer clips (policy/megatron/optimizer.py, policy/fsdp/optimizer.py)",
        )


def skipped_alarms(metrics: Mapping[str, float], cfg: TrainedGroupConfig) -> Iterator[Alarm]:
    """Yield an alarm when float16 skipped more updates in a row than the configuration allows."""
    count, limit = metrics.get("skipped_in_a_row", 0.0), cfg.loss_scaling.max_skipped_updates
    if count > limit:
        yield Alarm(
            tripwire="loss_scale",
            wrong=f"the last {count:g} updates were skipped, since their gradients overflowed float16, over "
            f"{cfg.label}.loss_scaling.max_skipped_updates={limit}; the loss's scale is "
            f"{metrics['loss_scale']:g}",
            look_at=f"{cfg.label}.loss_scaling.initial_loss_scale, where that is large; else what the model "
            f"computes: {cfg.label}.precision=bfloat16 has a wider range",
        )


def group_setting_alarms(measured: Mapping[str, float], cfg: TrainedGroupConfig) -> Iterator[Alarm]:
    """Yield an alarm when the optimizer's parameter groups have several learning rates, or no group has the
    configured weight decay."""
    spread = measured.get(Measured.learning_rate_spread, 0.0)
    if not spread <= _RATE_TOLERANCE * cfg.optimizer.lr:
        yield Alarm(
            tripwire="learning_rate",
            wrong=f"the learning rates of the optimizer's parameter groups differ by {spread:.3g}",
            look_at="where an update sets the rate (policy/megatron/backend.py, policy/fsdp/optimizer.py), "
            "and what a checkpoint restores",
        )
    due = cfg.optimizer.weight_decay
    decay = measured.get(Measured.weight_decay, due)
    if not abs(decay - due) <= _RATE_TOLERANCE * due:
        yield Alarm(
            tripwire="weight_decay",
            wrong=f"the weight decay is {decay:.6g}, and policy.optimizer.weight_decay is {due:.6g}",
            look_at="how the optimizer is built, and what a checkpoint restores of its groups",
            ends_run=False,
        )


def scheduled_rate(update: int, peak: float, cfg: SchedulerConfig) -> float:
    """Return the learning rate of an update, counted from 1, as docs and configuration define it.

    It is peak * update / warmup in the warm-up; then, with t from 0 at its end to 1 at ``decay_updates``,
    peak + t (min - peak), or min + (peak - min) (1 + cos(pi t)) / 2.
    """
    warmup, end = cfg.warmup_updates, cfg.decay_updates
    if update <= warmup:
        return peak * (update / warmup)
    if cfg.decay_style is LRDecayStyle.constant:
        return peak
    t = 1.0 if update >= end or end <= warmup else (update - warmup) / (end - warmup)
    if cfg.decay_style is LRDecayStyle.linear:
        return peak + t * (cfg.min_lr - peak)
    return cfg.min_lr + 0.5 * (peak - cfg.min_lr) * (1.0 + math.cos(math.pi * t))


def scheduled_rates(last: int, count: int, peak: float, cfg: SchedulerConfig) -> float:
    """Return the sum of the learning rates of the ``count`` updates that end with update ``last``."""
    return sum(scheduled_rate(update, peak, cfg) for update in range(last - count + 1, last + 1))


def finite_alarms(metrics: Mapping[str, float]) -> Iterator[Alarm]:
    """Yield an alarm when a metric of training is NaN or infinite."""
    wrong = sorted(name for name, value in metrics.items() if not math.isfinite(value))
    if wrong:
        yield Alarm(
            tripwire="finite",
            wrong=f"not finite: {', '.join(wrong[:8])}",
            look_at="the first step with such a metric; gradients too large, or a sample with odd log-probs",
        )
