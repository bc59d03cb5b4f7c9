"""The driver of synchronous GRPO; ``SyncGRPODriver.step`` reads as the algorithm.

driver                    rollout actor              policy workers            data plane
  prepare_step:
    ensure_version: trainer ─▶ engines, by callback
    begin, up to k steps ahead ──────────────────────────────────────────────▶ open partition
  parts ────────────────▶ generate, reward, flatten ── one put ──────────────▶ 3 columns
  ◀───── KVBatchMeta ─────┘  (again, while groups are missing)
  scale, shape, filter: on tags
  compute_logprobs ─────────────────────────────────▶ fetch, forward, write ─▶ + prev_logprobs
                                                                                (+ reference_logprobs,
                                                                                 entropies)
  compute_teacher_logprobs: with a teacher ─────────▶ fetch, forward, write ─▶ + teacher_logprobs, ...
  compute_values, by value workers: with a critic ──▶ fetch, forward, write ─▶ + values, returns, ...
  advantages: on tags
  train the critic, by value workers ───────────────▶ fetch, train
  train ────────────────────────────────────────────▶ fetch, train
  ◀───── metrics ──────────────────────────────────────┘
  close ─────────────────────────────────────────────────────────────────────▶ empty
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nemo_like.algorithms.entropy_coefficient import COEFFICIENT, EntropyCoefficient
from nemo_like.algorithms.options import Overlap
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.configuration import Config
from nemo_like.driver.checkpoints import RunCheckpoints, saved_groups
from nemo_like.driver.interface import (
    Partitions,
    Policy,
    Recovery,
    Rollout,
    StepObserver,
    Teacher,
    Value,
    WeightSync,
)
from nemo_like.driver.ready_groups import (
    ReadyGroups,
    first_update,
    in_update_order,
    join_parts,
    num_accumulated,
)
from nemo_like.driver.reports import CriticStep, StepReport, StepResults, train_report, tripwire_metrics
from nemo_like.driver.rollout_schedule import RolloutSchedule, StepRollout
from nemo_like.driver.stages import (
    kl_in_reward,
    validates_after,
    with_entropy_coefficient,
    with_idle,
    with_likelihood_weights,
    without_mismatch,
    without_truncated,
)
from nemo_like.driver.step_checks import StepTripwires
from nemo_like.driver.stopping import StopRequests
from nemo_like.driver.tag_functions import with_estimated_advantages
from nemo_like.driver.validation import (
    ValidationReport,
    ValidationSet,
    held_out_prompts,
    reached_goal,
    validation_report,
)
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.summary import SampleAnswer
from nemo_like.observability.timers import SlowestPass, StageTimer
from nemo_like.policy.batch.policy_columns import scored_in_step
from nemo_like.policy.groups.results import ScoredBatch, TrainUpdate
from nemo_like.rollout.options import dumps_rollouts_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """The concrete parts of a training run, put together by ``setup``."""

    partitions: Partitions
    rollout: Rollout
    policy: Policy
    value: Value | None  # a critic; with grpo.adv_estimator.name=gae
    teacher: Teacher | None  # with loss_fn.kind=distillation, or a loss of one's own
    weight_sync: WeightSync
    schedule: RolloutSchedule
    validation_sets: tuple[ValidationSet, ...]
    logger: RunLogger
    observer: StepObserver
    checkpoints: RunCheckpoints
    stop_requests: StopRequests
    recovery: Recovery
    tripwires: StepTripwires


class SyncGRPODriver:
    """Makes one on-policy step after the other; carries ``KVBatchMeta`` and floats, never a token."""

    def __init__(self, cfg: Config, components: Components) -> None:
        self.cfg = cfg
        self.partitions = components.partitions
        self.rollout = components.rollout
        self.policy, self.value, self.teacher = components.policy, components.value, components.teacher
        self.weight_sync = components.weight_sync
        self.schedule = components.schedule
        self.validation_sets = components.validation_sets
        self.logger = components.logger
        self.observer = components.observer
        self.checkpoints = components.checkpoints
        self.stop_requests = components.stop_requests
        self.recovery = components.recovery
        self.num_samples = cfg.grpo.num_samples_per_step
        self.groups = saved_groups(self.policy, self.value)
        self.position = self.checkpoints.resume(self.groups, self.schedule)
        self.policy_version = self.position.policy_version
        self.tripwires = components.tripwires
        if self.checkpoints.found is not None:
            saved = self.checkpoints.found.state.sampler
            self.tripwires.check_resume(self.position.step, self.schedule.state_dict(), saved)
        found = self.checkpoints.found
        self.entropy_coefficient = EntropyCoefficient.at_start(
            cfg.loss_fn, found.state.metrics if found else {}
        )
        self.sample_answers: Sequence[SampleAnswer] = ()  # of the latest validation

    def run(self) -> str | None:
        """Make all steps from the run's position on, with validations and checkpoints when they are due.

        Return why the run was asked to stop before its last step; None when it made its last step or a
        validation reached the goal.
        """
        grpo, timer = self.cfg.grpo, SlowestPass()
        if validates_after(self.position.step, grpo):
            if self.position.step == 0:
                self.validate(step=0)
                self.logger.flush(step=0)
            else:
                # That validation was done before the run was ended, and had sent these weights to the
                # engines. Send them again here, so that the next step counts no transfer, as it did then.
                self.weight_sync.ensure_version(self.policy_version)
        self.begin_stretch(self.position.step)
        with self.stop_requests.listening(self.logger.note):
            for step in range(self.position.step + 1, grpo.max_num_steps + 1):
                with timer:
                    metrics = self.step_and_validate(step)
                    self.checkpoints.settle()
                self.stop_requests.after_step(step, metrics)
                has_goal = reached_goal(metrics, grpo)
                if has_goal:
                    self.logger.note(f"stopped after step {step}: grpo.val_stop_threshold is reached")
                is_last = has_goal or step == grpo.max_num_steps
                reason = None if is_last else self.stop_requests.reason(next_step_s=timer.slowest_s)
                if is_last or reason or self.checkpoints.is_due(step):
                    self.save(metrics)
                if is_last or reason:
                    self.checkpoints.finish()
                    return reason
                if self.checkpoints.is_due(step):
                    self.begin_stretch(step)
        return None

    def begin_stretch(self, step: int) -> None:
        """Begin the journal's next stretch after ``step``; see ``RolloutSchedule.begin_stretch``."""
        self.recovery.completed(
            f"the weight sync after step {step}",
            self.policy_version,
            lambda: self.schedule.begin_stretch(step, self.policy_version),
        )

    def step_and_validate(self, step: int) -> dict[str, float]:
        """Make a step and, when one is due, the validation after it; log and return their metrics."""
        report = self.recovery.completed(
            f"step {step}", self.policy_version, lambda: self.observed_step(step)
        )
        metrics = self.with_coefficient(report.metrics)
        self.logger.log_step(step, metrics)
        self.tripwires.warn_or_end(step, report.alarms)
        if validates_after(step, self.cfg.grpo):
            metrics = {**metrics, **self.validate(step).metrics}
        self.logger.flush(step)
        self.position = self.position.after(step, self.policy_version, metrics, self.num_samples)
        return metrics

    def with_coefficient(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return a completed step's metrics with the entropy's coefficient that it had, where that moves, and
        move it."""
        if self.entropy_coefficient is None:
            return dict(metrics)
        found = {**metrics, COEFFICIENT: self.entropy_coefficient.value}
        self.entropy_coefficient = self.entropy_coefficient.after(found, self.cfg.loss_fn)
        return found

    def observed_step(self, step: int) -> StepReport:
        """Make a step while the observer records, and return its report with the GPUs' metrics."""
        with self.observer.observing(step):
            report = self.step(step)
        return report.with_metrics(self.observer.gpu_metrics())

    def save(self, metrics: Mapping[str, float]) -> None:
        """Save the run if checkpoints are enabled. ``metrics`` are those of the latest step."""
        run_id, export_hf = self.logger.wandb_run_id, self.policy.export_hf
        self.checkpoints.save(self.position, metrics, self.groups, self.schedule, run_id, export_hf)

    def step(self, step: int) -> StepReport:
        """Make one GRPO step: P prompts x G generations = N samples.

        Only KVBatchMeta and lists of N Python numbers exist here; every token column stays in the data plane
        and in the workers.
        """
        grpo, timer = self.cfg.grpo, StageTimer()
        with self.prepare_step(step, timer) as rollout:
            # There is one part, unless grpo.overlap=exact: then a part comes whenever groups have ended.
            parts = [self.accumulate(self.estimate(step, part, timer), timer) for part in rollout.parts()]
            ready = join_parts(parts, grpo)
            batch, collected = ready.batch, rollout.collected(ready.batch)
            if dumps_rollouts_of(step, self.cfg.rollout):
                self.rollout.dump(step, (batch, *collected.dropped))

            critic = None
            if self.value is not None:
                with timer("value_training"):
                    critic = CriticStep(ready.valued, self.value.train(batch))
            with timer("policy_training"):
                update = self.train_policy(step, batch)
        self.policy_version = update.version
        opened = self.partitions.take_operations()
        results = StepResults(batch, collected, ready, update, rollout.weight_sync, opened, critic)
        report = train_report(results, timer.metrics("timing/train/"))
        alarms = self.tripwires.check(rollout.prompts, results, rollout.sent)
        return replace(report, alarms=alarms).with_metrics(tripwire_metrics(results, rollout.sent.canary_gap))

    def estimate(self, step: int, batch: KVBatchMeta, timer: StageTimer) -> ReadyGroups:
        """Score whole groups of a step, mask samples that shall not train, and estimate advantages."""
        grpo = self.cfg.grpo
        if grpo.overlong_filtering:
            batch = without_truncated(batch)
        batch = in_update_order(batch, grpo)
        with timer("logprobs"):
            scored = self.score(step, batch)
        batch = without_mismatch(scored.batch, grpo.seq_logprob_error_threshold)
        taught = ScoredBatch(batch)
        if self.teacher is not None:
            with timer("teacher_logprobs"):
                taught = self.teacher.compute_teacher_logprobs(batch)
        valued = ScoredBatch(taught.batch)
        if self.value is not None:
            with timer("values"):
                valued = self.value.compute_values(taught.batch)
        with timer("advantage"):
            batch = with_estimated_advantages(
                valued.batch, grpo, kl_in_reward(valued.batch, self.cfg.loss_fn)
            )
        batch = with_likelihood_weights(
            batch,
            self.cfg.loss_fn,
            solved_reward=grpo.val_solved_reward,
            update_size=self.cfg.policy.train_global_batch_size,
        )
        batch = with_entropy_coefficient(batch, self.entropy_coefficient, self.cfg.loss_fn)
        if grpo.skip_idle_samples:
            batch = with_idle(batch, self.cfg.loss_fn)
        return ReadyGroups(batch, scored, taught, valued)

    def accumulate(self, part: ReadyGroups, timer: StageTimer) -> ReadyGroups:
        """With grpo.overlap=exact, add the gradient of a part's samples in the first update to the gradient
        that the workers hold."""
        if self.cfg.grpo.overlap is Overlap.off:
            return part
        with timer("policy_training"):
            accumulation = self.policy.accumulate(first_update(part.batch, self.cfg))
        return replace(part, accumulation_s=accumulation.compute_s)

    def score(self, step: int, batch: KVBatchMeta) -> ScoredBatch:
        """Compute the log-probs that the loss compares with, under the weights before the first update; also
        the entropies, when the step's rollouts are dumped.

        Return the batch unchanged when the loss needs none.
        """
        columns = scored_in_step(step, self.cfg.loss_fn, self.cfg.rollout)
        return self.policy.compute_logprobs(batch, columns) if columns else ScoredBatch(batch)

    def train_policy(self, step: int, batch: KVBatchMeta) -> TrainUpdate:
        """Train the policy, or leave it unchanged in the first steps, in which a critic warms up."""
        if self.cfg.value is not None and step <= self.cfg.value.warmup_steps:
            return self.policy.skip(batch)
        return self.policy.train(batch, num_accumulated=num_accumulated(self.cfg))

    def validate(self, step: int) -> ValidationReport:
        """Validate after ``step``, log the report and return it."""
        report = self.recovery.completed(
            f"the validation after step {step}", self.policy_version, lambda: self.held_out(step)
        )
        self.logger.log_validation(step, report.metrics, self.sample_answers)
        return report

    def held_out(self, step: int) -> ValidationReport:
        """Roll out all held-out sets as a step rolls out its prompts, in a partition of their own, and return
        the report."""
        grpo, timer = self.cfg.grpo, StageTimer()
        prompts = held_out_prompts(self.validation_sets, step, self.policy_version, grpo)
        with timer("validation"):
            self.weight_sync.ensure_version(self.policy_version)
            with self.partitions.partition(f"validation-{step}") as partition:
                rollout = self.rollout.run(prompts, partition)
            self.weight_sync.end_generation()
        self.partitions.take_operations()  # not reported: data_plane/ metrics are of training steps alone
        self.sample_answers = self.rollout.sample_answers()
        return validation_report(rollout, self.validation_sets, grpo, timer.metrics("timing/validation/"))

    @contextmanager
    def prepare_step(self, step: int, timer: StageTimer) -> Iterator[StepRollout]:
        """Bring the engines to the policy's weights, begin all rollouts that may run by now, and yield the
        step's own; close its partition on exit, also when a stage raised.

        ``timer`` measures the whole block.
        """
        with timer("total_step_time"), self.schedule.of_step(step, self.policy_version, timer) as rollout:
            yield rollout
