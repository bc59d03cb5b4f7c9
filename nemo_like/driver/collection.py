"""Collects the groups that a step trains on: rollouts, rewards, and, with dynamic sampling, refills.

    prompts ─▶ rollout ─▶ scale, shape, filter ─▶ raw rewards differ? ─ yes ─▶ kept, until P are there
       ▲                                                 └─ no ─▶ dropped: their samples are cleared
       └──── further prompts, while groups are missing

With grpo.overlap=exact the groups come in parts, each as soon as it is certain that its groups will train. P
is grpo.num_prompts_per_step. Every rollout asks for P prompts, as in DAPO (arXiv 2503.14476), or for the
grpo.dynamic_sampling_num_prompts that the configuration names. Good groups beyond P are dropped too: if the
next step used them, it would train on samples of older weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.algorithms.rewards import Outcome, informative_groups
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import GROUP_ID, SAMPLE_MASK
from nemo_like.data_plane.operations import Operation
from nemo_like.driver.interface import Rollout
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.stages import compared_rewards, with_outcome, with_shaped_rewards
from nemo_like.driver.tag_functions import without_refused
from nemo_like.observability.metrics import Metric, merge
from nemo_like.rollout.prompts import PromptBatch, RolloutResult, WantedGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """The P groups that a step trains on, ordered by (prompt, generation), and the cost of getting them."""

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
    engines: Mapping[str, Metric] = field(default_factory=dict)  # how busy the engines were

    @property
    def generated(self) -> tuple[KVBatchMeta, ...]:
        """All sampled groups, the dropped ones last."""
        return (self.batch, *self.dropped)


class PartOrder(Protocol):
    """Says in which order the groups of rollouts come, if that order is known. ``RunJournal`` is one."""

    def wanted(self, prompts: PromptBatch, at_least: int) -> WantedGroups:
        """Return the groups that the next part of a rollout shall have, or else ask for ``at_least``
        groups."""

    def took(self, prompts: PromptBatch, positions: Sequence[int]) -> None:
        """Note which groups the part had, by their positions among the prompts."""


class Collection:
    """Collects the groups that a step trains on, and clears all others."""

    def __init__(
        self,
        begun: PromptBatch,
        partition: str,
        *,
        rollout: Rollout,
        cfg: GRPOConfig,
        more_prompts: Callable[[PromptBatch], PromptBatch],
        journal: PartOrder,
        multiple: int | None = None,
    ) -> None:
        """Collect from the rollout of ``begun`` into ``partition``, which has begun.

        ``more_prompts(last)`` returns the prompts of the rollout after ``last``; ``journal`` says in which
        order groups come, and notes it. Every part but the last has a multiple of ``multiple`` groups; None:
        there is one part.
        """
        self._begun, self._partition = begun, partition
        self._rollout, self._cfg, self._more_prompts = rollout, cfg, more_prompts
        self._wanted, self._multiple, self._journal = cfg.num_prompts_per_step, multiple, journal
        self._results: list[RolloutResult] = []
        self._num_rollouts = 0
        self._dropped: list[KVBatchMeta] = []
        self._cleared: list[Operation] = []

    def parts(self) -> Iterator[KVBatchMeta]:
        """Yield the groups to train on, part by part; within a part they are ordered by (prompt, generation).

        Raises RunFailed when ``grpo.dynamic_sampling_max_gen_batches`` rollouts do not give enough groups.
        """
        multiple, ready = self._multiple or self._wanted, None
        for batch in self._groups():
            ready = batch if ready is None else KVBatchMeta.concat([ready, batch])
            groups = _groups_of(ready)
            if count := len(groups) // multiple * multiple:
                yield _of_groups(ready, groups[:count])
                ready = _of_groups(ready, groups[count:]) if count < len(groups) else None
        if ready is not None:
            yield in_order(ready)

    def collected(self, batch: KVBatchMeta) -> Collected:
        """Return the collected groups, ``batch``, with the metrics and times of all their rollouts. Call it
        after the last part."""
        results = self._results
        return Collected(
            batch=batch,
            dropped=tuple(self._dropped),
            metrics=merge(result.metrics for result in results),
            num_rollouts=self._num_rollouts,
            generation_s=sum(result.generation_s for result in results),
            reward_s=sum(result.reward_s for result in results),
            put_s=sum(result.put_s for result in results),
            operations=[*(one for result in results for one in result.operations), *self._cleared],
            measured=merge(result.measured for result in results),
            engines=merge(result.engines for result in results),
        )

    def _groups(self) -> Iterator[KVBatchMeta]:
        """Yield groups over all rollouts, each as soon as it is certain to train."""
        prompts, num_kept = self._begun, 0
        while True:
            self._num_rollouts += 1
            for batch in self._groups_of_rollout(prompts, self._wanted - num_kept):
                num_kept += len(_groups_of(batch))
                yield batch
            if num_kept == self._wanted:
                return
            if self._num_rollouts == self._cfg.dynamic_sampling_max_gen_batches:
                raise RunFailed(_shortage(self._cfg, num_kept, self._num_rollouts))
            prompts = self._more_prompts(prompts)
            self._rollout.begin(prompts, self._partition)

    def _groups_of_rollout(self, prompts: PromptBatch, room: int) -> Iterator[KVBatchMeta]:
        """Yield the groups of one rollout that will be trained on: the first ``room`` groups that the filters
        keep, in the order of the prompts."""
        choice = _Choice(prompts, room)
        good: list[KVBatchMeta] = []  # groups that may train and are not yielded yet
        is_last = False
        while not is_last:
            wanted = self._journal.wanted(prompts, self._multiple or len(prompts))
            result = self._rollout.next_part(prompts, wanted)
            self._journal.took(prompts, [group - prompts.first_group for group in _groups_of(result.batch)])
            self._results.append(result)
            is_last = result.is_last
            batch = without_refused(with_shaped_rewards(result.batch, self._cfg), self._cfg)
            may_train = _groups_to_train(batch, self._cfg)
            choice.decide(_groups_of(batch), may_train)
            waiting = KVBatchMeta.concat([*good, _of_groups(batch, may_train)])
            certain = choice.take_certain()
            good = [_without_groups(waiting, certain)]
            uniform = with_outcome(_without_groups(batch, may_train), Outcome.uniform_group)
            self._drop(uniform, *(with_outcome(one, Outcome.surplus_group) for one in good if is_last))
            if certain:
                yield _of_groups(waiting, certain)

    def _drop(self, *batches: KVBatchMeta) -> None:
        """Clear samples that will not train, if there are any."""
        dropped = [batch for batch in batches if len(batch)]
        if dropped:
            self._cleared += self._rollout.clear(dropped)
            self._dropped += dropped


class _Choice:
    """Chooses the groups of a rollout that train, the first ``room`` good ones, while some groups are still
    missing."""

    def __init__(self, prompts: PromptBatch, room: int) -> None:
        first = prompts.first_group
        self._is_good: dict[int, bool | None] = dict.fromkeys(range(first, first + len(prompts)))
        self._room = room
        self._taken: set[int] = set()

    def decide(self, groups: Sequence[int], good: Sequence[int]) -> None:
        """Note which of ``groups`` are good."""
        self._is_good |= {group: group in good for group in groups}

    def take_certain(self) -> list[int]:
        """Return, once each, the groups that will train however the undecided groups turn out."""
        before = 0  # earlier groups that train or may train
        certain = []
        for group, is_good in self._is_good.items():
            if is_good and before < self._room and group not in self._taken:
                certain.append(group)
            before += is_good is not False
        self._taken |= set(certain)
        return certain


def in_order(batch: KVBatchMeta) -> KVBatchMeta:
    """Return the batch with its groups in the order of their numbers."""
    group_ids = batch.tag(GROUP_ID)
    return batch.subset(sorted(range(len(batch)), key=group_ids.__getitem__))


def _groups_to_train(batch: KVBatchMeta, cfg: GRPOConfig) -> list[int]:
    group_ids = batch.tag(GROUP_ID)
    if not cfg.use_dynamic_sampling:
        return list(dict.fromkeys(group_ids))
    compared = compared_rewards(batch, cfg)
    mask = [kept * (value == value) for kept, value in zip(batch.tag(SAMPLE_MASK), compared, strict=True)]
    informative = set(informative_groups(compared, group_ids, mask))
    return [group_id for group_id in dict.fromkeys(group_ids) if group_id in informative]


def _groups_of(batch: KVBatchMeta) -> list[int]:
    return sorted(set(batch.tag(GROUP_ID)))


def _of_groups(batch: KVBatchMeta, groups: Sequence[int]) -> KVBatchMeta:
    """Return the samples of these groups, in the order of the groups' numbers."""
    chosen = set(groups)
    return in_order(batch.select([group_id in chosen for group_id in batch.tag(GROUP_ID)]))


def _without_groups(batch: KVBatchMeta, groups: Sequence[int]) -> KVBatchMeta:
    chosen = set(groups)
    return batch.select([group_id not in chosen for group_id in batch.tag(GROUP_ID)])


def _shortage(cfg: GRPOConfig, num_kept: int, num_rollouts: int) -> str:
    return (
        f"grpo.use_dynamic_sampling=true found {num_kept} of {cfg.num_prompts_per_step} groups with "
        f"different rewards in {num_rollouts * cfg.rollout_shape.num_prompts} groups, and "
        f"grpo.dynamic_sampling_max_gen_batches={num_rollouts} allows no more; the task may be too hard or "
        "too easy for this policy: look at train/baseline_reward/pct_0 and pct_1 without dynamic sampling, "
        "mix in other problems, use larger groups, or allow more batches"
    )
