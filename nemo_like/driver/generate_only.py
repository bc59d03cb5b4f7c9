"""The driver of a run that only rolls out and rewards, to look at samples or record them; it trains nothing.

    prompts ──▶ parts of a rollout ──▶ filters, advantages on tags ──▶ dump, metrics

The engines serve the checkpoint as they loaded it. With the configuration of a critic, which is not there
either, samples get no advantages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import AS_LOADED
from nemo_like.configuration import Config
from nemo_like.driver.interface import Partitions, Recovery, Rollout, StepObserver
from nemo_like.driver.reports import StepReport, generation_report
from nemo_like.driver.rollout_schedule import RolloutSchedule
from nemo_like.driver.stages import without_truncated
from nemo_like.driver.stopping import StopRequests
from nemo_like.driver.tag_functions import with_estimated_advantages
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.summary import SampleAnswer
from nemo_like.observability.timers import StageTimer
from nemo_like.rollout.options import dumps_rollouts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationComponents:
    """The concrete parts of a generation-only run, put together by ``setup``."""

    partitions: Partitions
    rollout: Rollout
    schedule: RolloutSchedule
    logger: RunLogger
    observer: StepObserver
    recovery: Recovery
    stop_requests: StopRequests


class GenerationDriver:
    """Makes one rollout after the other; carries ``KVBatchMeta`` and floats, never a token."""

    def __init__(self, cfg: Config, components: GenerationComponents) -> None:
        self.cfg = cfg
        self.components = components
        self.sample_answers: Sequence[SampleAnswer] = ()  # there is no validation

    def run(self) -> str | None:
        """Make grpo.max_num_steps steps and log their metrics.

        Return why the program that started the run asked for a stop; None when all steps were made.
        """
        stop_requests, num_steps = self.components.stop_requests, self.cfg.grpo.max_num_steps
        for step in range(1, num_steps + 1):
            work = partial(self.observed_step, step)
            report = self.components.recovery.completed(f"step {step}", AS_LOADED, work)
            self.components.logger.log_step(step, report.metrics)
            self.components.logger.flush(step)
            stop_requests.after_step(step, report.metrics)
            if step < num_steps and stop_requests.by_callback is not None:
                return stop_requests.by_callback
        return None

    def observed_step(self, step: int) -> StepReport:
        """Make a step while the observer records, and return its report with the GPUs' metrics."""
        with self.components.observer.observing(step):
            report = self.step(step)
        return report.with_metrics(self.components.observer.gpu_metrics())

    def step(self, step: int) -> StepReport:
        """Make the first half of a GRPO step: everything up to the advantages."""
        grpo, timer = self.cfg.grpo, StageTimer()
        of_step = self.components.schedule.of_step(step, AS_LOADED, timer)
        with timer("total_step_time"), of_step as rollout:
            collected = rollout.collected(KVBatchMeta.concat([*rollout.parts()]))
            batch = without_truncated(collected.batch) if grpo.overlong_filtering else collected.batch
            if self.cfg.value is None:  # else advantages need a critic's values, and no critic is there
                with timer("advantage"):
                    batch = with_estimated_advantages(batch, grpo)
        if dumps_rollouts_of(step, self.cfg.rollout):
            self.components.rollout.dump(step, (batch, *collected.dropped))
        opened = self.components.partitions.take_operations()
        return generation_report(batch, collected, opened, timer.metrics("timing/train/"))
