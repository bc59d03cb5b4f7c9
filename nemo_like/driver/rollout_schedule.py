"""``RolloutSchedule``: decides which rollouts are under way while a step trains, and with which weights.

    step            s                          s + 1
    before it       engines get version s - 1  engines get version s
    begins          rollout s + k              rollout s + 1 + k         (at the start, all up to it)
    trains on       rollout s, part by part    rollout s + 1

k is grpo.max_staleness. With k = 0 rollouts and training alternate. Prompts are drawn in the data's order,
each step trains on its own, and none is thrown away. Each rollout has a partition, which is open from its
begin until its step is over; so at most k + 1 hold samples, and rollouts that are ahead wait for training.

When a checkpoint is due after a step, no later rollout begins before that step has ended. So no rollout is
under way when a checkpoint is saved, and a run that continues from it makes the same steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.configuration import Config
from nemo_like.data.sampler import MixtureSampler
from nemo_like.driver.collection import Collected, Collection
from nemo_like.driver.interface import CanaryScores, Partitions, Rollout, WeightSync
from nemo_like.driver.run_journal import RunJournal
from nemo_like.driver.step_checks import Sent
from nemo_like.observability.metrics import Metric
from nemo_like.observability.timers import StageTimer
from nemo_like.plan.derived import groups_per_part
from nemo_like.rollout.prompts import PromptBatch, RolloutMode, newest_under_way

_UNDER_WAY = "under_way"  # key of the saved state: the prompts of rollouts that no step has trained on


@dataclass(frozen=True, slots=True)
class _UnderWay:
    """A rollout that no step has trained on yet, and its partition."""

    prompts: PromptBatch
    partition: str


@dataclass(slots=True)
class StepRollout:
    """The rollout of the step under way, and facts on the weights that the engines have meanwhile."""

    prompts: PromptBatch
    sent: Sent
    weight_sync: Mapping[str, Metric]
    _collection: Collection
    _timer: StageTimer
    _generation_is_over: Callable[[], None]

    def parts(self) -> Iterator[KVBatchMeta]:
        """Yield the groups to train on: all at once or, with grpo.overlap=exact, in parts as groups end.
        Raises RunFailed as ``Collection.parts`` does."""
        parts = self._collection.parts()
        while True:
            with self._timer("generation"):
                part = next(parts, None)
            if part is None:
                return
            self._generation_is_over()
            yield part

    def collected(self, batch: KVBatchMeta) -> Collected:
        """Return the collected groups, ``batch``, with the metrics and times of all their rollouts. Call it
        after the last part."""
        return self._collection.collected(batch)


class RolloutSchedule:
    """Begins the rollouts of a run, and hands each over to its step."""

    def __init__(
        self,
        cfg: Config,
        *,
        partitions: Partitions,
        rollout: Rollout,
        weight_sync: WeightSync,
        sampler: MixtureSampler,
        journal: RunJournal,
        settles_after: Callable[[int], bool],
        canary: CanaryScores | None = None,
    ) -> None:
        """Plan with ``settles_after(step)``, which says whether no rollout may be under way when ``step`` is
        over; ``canary`` compares engines and trainer before each step."""
        self._cfg, self._partitions, self._rollout = cfg, partitions, rollout
        self._weight_sync, self._canary = weight_sync, canary
        self._sampler, self._journal, self._settles_after = sampler, journal, settles_after
        self._under_way: deque[_UnderWay] = deque()
        self._drawn: deque[tuple[int, ...]] = deque()  # prompts of rollouts that must begin again

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to, from 0."""
        return self._sampler.epoch

    @contextmanager
    def of_step(self, step: int, version: int, timer: StageTimer) -> Iterator[StepRollout]:
        """Bring the engines to policy version ``version``, with which ``step`` will train; begin all rollouts
        that may run by now; yield the rollout of ``step``.

        Its partition is closed on exit, also when the block raised.
        """
        with timer("weight_sync"):
            weight_sync = self._weight_sync.ensure_version(version)
            canary_gap = None if self._canary is None else self._canary.gap()
        if self._cfg.rollout.max_tokens_per_step is not None:
            self._rollout.begin_step(step)
        self._begin_up_to(step, version)
        begun = self._under_way.popleft()
        try:
            collection = Collection(
                begun.prompts,
                begun.partition,
                rollout=self._rollout,
                cfg=self._cfg.grpo,
                more_prompts=lambda last: self._more_prompts(last, version),
                journal=self._journal,
                multiple=groups_per_part(self._cfg),
            )
            yield StepRollout(
                begun.prompts,
                Sent(self._weight_sync.digest, canary_gap),
                weight_sync,
                collection,
                timer,
                self._weight_sync.end_generation,
            )
        finally:
            self._partitions.close(begun.partition)
        self._journal.trained(step)

    def begin_stretch(self, after_step: int, version: int) -> None:
        """Bring the engines to policy version ``version`` and begin a stretch of the journal. No rollout may
        be under way; see ``RunJournal.begin_stretch``."""
        if self._journal.is_on:
            self._weight_sync.ensure_version(version)
            self._journal.begin_stretch(after_step)

    def abandon(self, work: str) -> None:
        """Close the partitions of all rollouts under way, since ``work``, such as "step 5", is done again.
        ``load_state_dict`` must follow, to set the prompt order back."""
        while self._under_way:
            self._partitions.close(self._under_way.popleft().partition)
        self._journal.abandoned(work)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position in the order of prompts, and the prompts of rollouts that no step has trained
        on."""
        indices = [*(list(one.prompts.indices) for one in self._under_way), *map(list, self._drawn)]
        return {**self._sampler.state_dict(), **({_UNDER_WAY: indices} if indices else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Rollouts that were under way begin again, with the same seeds, when the
        next step asks for them.

        Raises ValueError as ``MixtureSampler.load_state_dict`` does.
        """
        self._sampler.load_state_dict(state)  # type: ignore[arg-type]
        self._drawn = deque(tuple(indices) for indices in state.get(_UNDER_WAY, ()))

    def _begin_up_to(self, step: int, version: int) -> None:
        """Begin the rollout of ``step`` and all later ones that may be under way, unless they have begun."""
        grpo = self._cfg.grpo
        newest = min(newest_under_way(step, grpo.max_staleness, self._settles_after), grpo.max_num_steps)
        for ahead in range(len(self._under_way), newest - step + 1):
            self._begin(step + ahead, version, ahead)

    def _begin(self, step: int, version: int, ahead: int) -> None:
        grpo = self._cfg.grpo
        prompts = PromptBatch(
            mode=RolloutMode.training,
            step=step,
            policy_version=version,
            indices=self._drawn.popleft()
            if self._drawn
            else self._sampler.next(grpo.rollout_shape.num_prompts),
            num_generations=grpo.step_shape.num_generations,
            num_steps_ahead=ahead,
        )
        self._journal.begun(prompts)
        begun = _UnderWay(prompts, f"train-{step}")
        self._partitions.open(begun.partition)
        self._under_way.append(begun)
        self._rollout.begin(prompts, begun.partition)

    def _more_prompts(self, last: PromptBatch, version: int) -> PromptBatch:
        """Return the next prompts for the step of ``last``, whose groups were too few."""
        prompts = replace(
            last,
            indices=self._sampler.next(len(last)),
            policy_version=version,
            first_group=last.first_group + len(last),
            num_steps_ahead=0,
        )
        self._journal.begun(prompts)
        return prompts
