"""Collects the groups that a step trains on: rollouts, rewards, and, with dynamic sampling, refills.

    prompts ─▶ rollout.run ─▶ scale, shape, filter ─▶ raw rewards differ? ─ yes ─▶ kept, until P are there
       ▲                                                     └─ no ─▶ dropped: their samples are cleared
       └──── P further prompts, while groups are missing

P is grpo.num_prompts_per_step. Every rollout asks for P prompts, as in DAPO (arXiv 2503.14476). Good groups
beyond P are dropped too: if the next step used them, it would train on samples of older weights.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemo_like.algorithms.rewards import Outcome
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import GROUP_ID
from nemo_like.config.schema import GRPOConfig
from nemo_like.data_plane.operations import Operation
from nemo_like.driver.interface import Rollout
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.stages import with_outcome, with_shaped_rewards
from nemo_like.driver.tag_functions import passing, without_refused
from nemo_like.observability.metrics import Metric, merge
from nemo_like.rollout.prompts import PromptBatch, RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The P groups that a step trains on, ordered by (prompt, generation), and what it took to get them."""

    batch: KVBatchMeta
    dropped: tuple[KVBatchMeta, ...]  # metadata only: the samples are cleared
    metrics: Mapping[str, Metric]  # over everything generated
    num_rollouts: int
    generation_s: float
    reward_s: float
    put_s: float
    operations: Sequence[Operation]  # of the rollout actor in the data plane
    # For the tripwires, over everything generated.
    measured: Mapping[str, Metric] = field(default_factory=dict)

    @property
    def generated(self) -> tuple[KVBatchMeta, ...]:
        """Everything that was sampled, the dropped groups last."""
        return (self.batch, *self.dropped)


def collect_groups(
    prompts: PromptBatch,
    partition: str,
    *,
    rollout: Rollout,
    cfg: GRPOConfig,
    more_prompts: Callable[[PromptBatch], PromptBatch],
) -> Collected:
    """Run rollouts until there are as many groups to train on as ``prompts``, and clear all others.

    ``more_prompts(last)`` returns the prompts of the rollout after the one of ``last``. Raises RunFailed when
    ``grpo.dynamic_sampling_max_gen_batches`` rollouts do not give enough groups.
    """
    wanted, num_kept = len(prompts), 0
    results: list[RolloutResult] = []
    kept: list[KVBatchMeta] = []
    dropped: list[KVBatchMeta] = []
    cleared: list[Operation] = []
    while True:
        results.append(rollout.run(prompts, partition))
        batch = without_refused(with_shaped_rewards(results[-1].batch, cfg), cfg)
        good = _groups_to_train(batch, cfg)
        used = good[: wanted - num_kept]
        num_kept += len(used)
        kept.append(_of_groups(batch, used))
        unused = _dropped(batch, good, used)
        if unused:
            cleared += rollout.clear(unused)
            dropped += unused
        if num_kept == wanted:
            collected = _collected(results, kept, dropped)
            return replace(collected, operations=[*collected.operations, *cleared])
        if len(results) == cfg.dynamic_sampling_max_gen_batches:
            raise RunFailed(_shortage(cfg, wanted, num_kept, len(results)))
        prompts = more_prompts(prompts)


def _groups_to_train(batch: KVBatchMeta, cfg: GRPOConfig) -> list[Hashable]:
    group_ids = batch.tag(GROUP_ID)
    if not cfg.use_dynamic_sampling:
        return list(dict.fromkeys(group_ids))
    kept = zip(group_ids, passing("different_rewards", batch, cfg), strict=True)
    return list(dict.fromkeys(group_id for group_id, passes in kept if passes))


def _of_groups(batch: KVBatchMeta, groups: Sequence[Hashable]) -> KVBatchMeta:
    chosen = set(groups)
    return batch.select([group_id in chosen for group_id in batch.tag(GROUP_ID)])


def _dropped(batch: KVBatchMeta, good: Sequence[Hashable], used: Sequence[Hashable]) -> list[KVBatchMeta]:
    """Return the groups that will not train, with the reason as their outcome.

    ``good`` are the groups that could train, ``used`` the first of them, which do.
    """
    trainable = set(good)
    uniform = [group_id for group_id in dict.fromkeys(batch.tag(GROUP_ID)) if group_id not in trainable]
    parts = (
        with_outcome(_of_groups(batch, uniform), Outcome.uniform_group),
        with_outcome(_of_groups(batch, good[len(used) :]), Outcome.surplus_group),
    )
    return [part for part in parts if len(part)]


def _collected(
    results: Sequence[RolloutResult], kept: Sequence[KVBatchMeta], dropped: Sequence[KVBatchMeta]
) -> Collected:
    return Collected(
        batch=KVBatchMeta.concat(kept),
        dropped=tuple(dropped),
        metrics=merge(result.metrics for result in results),
        num_rollouts=len(results),
        generation_s=sum(result.generation_s for result in results),
        reward_s=sum(result.reward_s for result in results),
        put_s=sum(result.put_s for result in results),
        operations=[operation for result in results for operation in result.operations],
        measured=merge(result.measured for result in results),
    )


def _shortage(cfg: GRPOConfig, wanted: int, num_kept: int, num_rollouts: int) -> str:
    return (
        f"grpo.use_dynamic_sampling=true found {num_kept} of {wanted} groups with different rewards in "
        f"{num_rollouts * wanted} groups, and grpo.dynamic_sampling_max_gen_batches={num_rollouts} allows no "
        "more; the task may be too hard or too easy for this policy: look at train/baseline_reward/pct_0 "
        "and pct_1 without dynamic sampling, mix in other problems, use larger groups, or allow more batches"
    )
