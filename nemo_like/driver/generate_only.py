"""The driver of a run that only rolls out and rewards, to look at samples or to record them; nothing trains.

    prompts ──▶ collect_groups ──▶ filters, advantages on tags ──▶ dump, metrics

The engines serve the checkpoint as they loaded it. With the configuration of a critic, which is not there
either, samples get no advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from nemo_like.config.schema import Config
from nemo_like.data.sampler import MixtureSampler
from nemo_like.driver.collection import collect_groups
from nemo_like.driver.interface import Partitions, Recovery, Rollout, StepObserver
from nemo_like.driver.reports import StepReport, generation_report
from nemo_like.driver.stages import dumps_rollouts_of, without_truncated
from nemo_like.driver.tag_functions import with_estimated
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.summary import SampleAnswer
from nemo_like.observability.timers import StageTimer
from nemo_like.rollout.prompts import PromptBatch, RolloutMode

# The policy version of engines to which no trainer has sent weights.
_AS_LOADED = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationComponents:
    """The concrete parts of a generation-only run, put together by ``setup``."""

    partitions: Partitions
    rollout: Rollout
    train_sampler: MixtureSampler
    logger: RunLogger
    observer: StepObserver
    recovery: Recovery


class GenerationDriver:
    """Makes one rollout after the other; carries ``KVBatchMeta`` and floats, never a token."""

    def __init__(self, cfg: Config, components: GenerationComponents) -> None:
        self.cfg = cfg
        self.components = components
        self.sample_answers: Sequence[SampleAnswer] = ()  # there is no validation

    def run(self) -> None:
        """Make grpo.max_num_steps steps and log their metrics."""
        for step in range(1, self.cfg.grpo.max_num_steps + 1):
            work = partial(self.observed_step, step)
            report = self.components.recovery.completed(f"step {step}", _AS_LOADED, work)
            self.components.logger.log_step(step, report.metrics)

    def observed_step(self, step: int) -> StepReport:
        """Make a step while the observer looks on, and return its report with the GPUs' metrics."""
        with self.components.observer.observing(step):
            report = self.step(step)
        return report.with_metrics(self.components.observer.gpu_metrics())

    def step(self, step: int) -> StepReport:
        """Make the first half of a GRPO step: everything up to the advantages."""
        grpo, rollout, timer = self.cfg.grpo, self.components.rollout, StageTimer()
        with timer("total_step_time"), self.components.partitions.partition(f"train-{step}") as partition:
            with timer("generation"):
                collected = collect_groups(
                    self.next_prompts(step),
                    partition,
                    rollout=rollout,
                    cfg=grpo,
                    more_prompts=lambda last: self.next_prompts(last.step, last.first_group + len(last)),
                )
            batch = without_truncated(collected.batch) if grpo.overlong_filtering else collected.batch
            if self.cfg.value is None:  # else advantages need a critic's values, and no critic is there
                with timer("advantage"):
                    batch = with_estimated(batch, grpo)
        if dumps_rollouts_of(step, self.cfg.rollout):
            rollout.dump(step, (batch, *collected.dropped))
        opened = self.components.partitions.take_operations()
        return generation_report(batch, collected, opened, timer.metrics("timing/train/"))

    def next_prompts(self, step: int, first_group: int = 0) -> PromptBatch:
        """Return the next P training prompts, by index; their groups are numbered from ``first_group``."""
        grpo = self.cfg.grpo
        return PromptBatch(
            mode=RolloutMode.training,
            step=step,
            policy_version=_AS_LOADED,
            indices=self.components.train_sampler.next(grpo.num_prompts_per_step),
            num_generations=grpo.num_generations_per_prompt,
            first_group=first_group,
        )
