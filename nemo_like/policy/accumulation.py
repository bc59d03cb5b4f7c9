"""An update whose gradient was accumulated part by part, before its whole batch was there.

    accumulate, per part     gradient and loss by counts of 1: sums over tokens, or over samples
    train                    x share of the whole batch's counts ──▶ the gradient and loss of their mean

A loss is linear in its tokens' weights, so this is the update that all parts would make together.
"""

from __future__ import annotations

from nemo_like.batch.meta import GlobalBatch, Schedule
from nemo_like.policy.objective import Objective
from nemo_like.policy.train_metrics import TrainMetrics
from nemo_like.policy.update_watch import UpdateWatch


def check_accumulated(schedule: Schedule, *, is_held: bool) -> None:
    """Raise RuntimeError unless the schedule leaves exactly the accumulated updates without micro-batches:
    the first one where gradients are held, else none."""
    is_computed = [bool(update.micro_batches) for update in schedule.global_batches]
    if is_computed[0] is is_held:
        raise RuntimeError(
            "gradients were accumulated for the first update, and the schedule computes it again"
            if is_held
            else "the schedule computes nothing in its first update, and no gradients were accumulated"
        )
    if not all(is_computed[1:]):
        raise RuntimeError("only the first update of a schedule can have been accumulated")


def normalise_accumulated(
    objective: Objective, update: GlobalBatch, metrics: TrainMetrics, watch: UpdateWatch | None
) -> float:
    """Normalise the loss that was accumulated for ``update`` in ``metrics`` and ``watch``; return the factor,
    by which the gradient is to be multiplied too."""
    share = objective.share_of(update)
    metrics.scale_loss(share)
    if watch is not None:
        watch.normalise(update, share)
    return share
