"""Has the tripwires judge every step, and reports all of their alarms at once.

    tags, metrics, measurements ──▶ nemo_like.tripwires ──▶ alarms ──▶ a warning, or the run's end

A step is judged before its weights are saved. docs/explanation/tripwires.md says what each tripwire compares.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_like.algorithms.loss_traits import cuts_ratio, has_teacher
from nemo_like.algorithms.options import ClippedLossConfig
from nemo_like.algorithms.rewards import Outcome
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import (
    ADVANTAGE,
    GROUP_ID,
    IS_IDLE,
    IS_JUDGED,
    IS_TRUNCATED,
    KL_SQUARE_SUM,
    KL_SUM,
    NUM_RESPONSE_TOKENS,
    OUTCOME,
    REWARD,
    SAMPLE_MASK,
    SHAPED_REWARD,
    reward_component,
)
from nemo_like.configuration import Config
from nemo_like.driver.collection import Collected
from nemo_like.driver.reports import StepResults, critic_metrics
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.stages import compared_rewards, mean_advantages
from nemo_like.observability.metrics import Metric
from nemo_like.observability.reward_components import reward_components
from nemo_like.policy.groups.results import TrainUpdate
from nemo_like.policy.options import TrainedGroupConfig
from nemo_like.rollout.prompts import PromptBatch
from nemo_like.tripwires.agreement import agreement_alarms, routing_alarms
from nemo_like.tripwires.alarm import Alarm, alarm_message
from nemo_like.tripwires.batch_checks import (
    advantage_alarms,
    advantage_digest_alarms,
    count_alarms,
    expected_counts,
    group_alarms,
    mask_alarms,
    sample_alarms,
    trained_token_alarms,
    truncation_alarms,
    uniform_group_alarms,
)
from nemo_like.tripwires.canary_checks import canary_alarms
from nemo_like.tripwires.data_checks import prompt_alarms, resume_alarms
from nemo_like.tripwires.learning_signal import (
    FLAT_PER_CENT,
    LearningSignal,
    SignalSamples,
    StepSignal,
    step_signal,
)
from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.optimizer_checks import (
    copy_alarms,
    gradient_alarms,
    restored_alarms,
    setting_alarms,
    update_alarms,
    value_alarms,
)
from nemo_like.tripwires.options import Tripwires
from nemo_like.tripwires.reference_advantages import RewardedSamples, reference_advantages
from nemo_like.tripwires.rollout_checks import EqualResponses, judged_alarms, rollout_alarms
from nemo_like.tripwires.update_checks import (
    entropy_alarms,
    finite_alarms,
    first_ratio_alarms,
    first_reference_alarms,
    group_setting_alarms,
    loss_alarms,
    optimizer_alarms,
    ratio_alarms,
    scheduled_rates,
    skipped_alarms,
    token_entropy_alarms,
)
from nemo_like.tripwires.weight_checks import change_alarms, digest_alarms, weight_alarms

# Tripwires whose alarm says that an engine and the trainer do not have or compute the same.
_OF_A_MISMATCH = frozenset({"agreement", "weights_digest", "canary"})
_REMEDY = "debug.tripwires=off turns the tripwires off; docs/explanation/tripwires.md describes them"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts on a run, besides its configuration, that the tripwires need."""

    has_experts: bool  # the model is a mixture of experts
    num_prompts: int  # in the training data


@dataclass(frozen=True, slots=True)
class Sent:
    """Measurements of the weights that a step samples with; None for a measurement that was not taken."""

    digest: float | None  # on the trainer's side
    canary_gap: float | None = None  # between engines and trainer, nats per token


class StepTripwires:
    """Judges one step after the other, and keeps the values that the next step is compared with."""

    def __init__(
        self,
        cfg: Config,
        facts: RunFacts,
        warn: Callable[[str], None],
        mismatch: Callable[[], str] | None = None,
    ) -> None:
        """Take the limits from ``cfg``; ``warn`` gets a message at a tripwire's first warning.

        ``mismatch`` says in which module engines and trainer differ, once a tripwire has found that they do.
        """
        self._cfg, self._facts, self._warn, self._mismatch = cfg, facts, warn, mismatch
        self._is_off = cfg.debug.tripwires is Tripwires.off
        self._warned: set[str] = set()
        self._prompts: tuple[int, ...] | None = None  # of the step before
        self._num_updates: float | None = None  # after the step before
        self._num_value_updates: float | None = None  # likewise, of the critic
        self._equal_responses = EqualResponses()
        self._learning_signal = LearningSignal(solved_reward=cfg.grpo.val_solved_reward)
        # Of the weights with which a step may have been sampled, in the order in which they were sent.
        self._digests: deque[float] = deque(maxlen=cfg.grpo.max_staleness + 1)

    def check(self, prompts: PromptBatch, results: StepResults, sent: Sent) -> tuple[Alarm, ...]:
        """Return every alarm of a step, which was sampled with the weights ``sent``."""
        metrics = {**_values(results.ready.scored.metrics), **_values(results.update.metrics)}
        error = metrics.get("token_mult_prob_error")
        alarms = [*agreement_alarms(error, self._cfg, has_experts=self._facts.has_experts)]
        if self._is_off:
            return tuple(alarms)
        rollout, update = _values(results.rollout.measured), _values(results.update.measured)
        alarms += routing_alarms(metrics.get("routing_disagreement"), self._cfg)
        if sent.digest is not None and sent.digest not in self._digests:
            self._digests.append(sent.digest)
        alarms += digest_alarms(rollout, self._digests)
        has_experts = self._facts.has_experts
        alarms += canary_alarms(sent.canary_gap, self._cfg.policy, has_experts=has_experts)
        alarms += rollout_alarms(rollout)
        alarms += self._equal_responses.alarms(rollout)
        alarms += self._collected_alarms(results.rollout)
        alarms += self._batch_alarms(results.batch)
        if results.update.metrics:  # none where a critic trains alone
            alarms += self._count_alarms(results, update)
            alarms += self._update_alarms(results, metrics, update)
        alarms += self._critic_alarms(results)
        alarms += finite_alarms({**metrics, **critic_metrics(results.critic)})
        alarms += skipped_alarms(metrics, self._cfg.policy)
        if self._cfg.value is not None and results.critic is not None:
            alarms += skipped_alarms(_values(results.critic.update.metrics), self._cfg.value)
        alarms += prompt_alarms(prompts.indices, self._prompts, self._facts.num_prompts)
        self._prompts = prompts.indices
        if not has_teacher(self._cfg.loss_fn):  # else rewards need not matter
            alarms += self._learning_signal.alarms(self._signal(results))
        self._num_updates = update.get(Measured.num_updates)
        return tuple(alarms)

    def warn_or_end(self, step: int, alarms: Sequence[Alarm]) -> None:
        """Warn of a step's alarms, or, if one of them ends the run, raise RunFailed with all of them."""
        if any(alarm.ends_run for alarm in alarms):
            raise RunFailed(f"{self._message(alarms, step)}\nThe step is in no checkpoint. {_REMEDY}")
        new = [alarm for alarm in alarms if alarm.tripwire not in self._warned]
        self._warned |= {alarm.tripwire for alarm in new}
        if new:
            self._warn(self._message(new, step))

    def _message(self, alarms: Sequence[Alarm], step: int) -> str:
        """Return the message of some alarms, with the module in which engines and trainer differ if one of
        them says that they do."""
        message = alarm_message(alarms, step)
        if self._mismatch is None or not any(alarm.tripwire in _OF_A_MISMATCH for alarm in alarms):
            return message
        return (
            f"{message}\nwhere engines and trainer differ: {self._mismatch()}; scripts/find_mismatch.py "
            "compares a sample of the run"
        )

    def check_resume(self, step: int, restored: Mapping[str, object], saved: Mapping[str, object]) -> None:
        """Note that the run continues after the checkpoint of ``step``. Raises RunFailed unless the restored
        prompt order is the saved one."""
        self._learning_signal.resume()
        if not self._is_off and (alarms := [*resume_alarms(dict(restored), dict(saved))]):
            raise RunFailed(f"resumed {alarm_message(alarms, step)}\n{_REMEDY}")

    def _collected_alarms(self, rollout: Collected) -> Iterator[Alarm]:
        batch, failed = rollout.batch, rollout.metrics.get("num_failed_rewards")
        if failed is not None:
            num_unjudged = sum(not judged for part in rollout.generated for judged in part.tag(IS_JUDGED))
            yield from judged_alarms(num_unjudged, int(failed.value))
        if self._cfg.grpo.use_dynamic_sampling:
            yield from uniform_group_alarms(
                compared_rewards(batch, self._cfg.grpo), batch.prompt_index, _compared(batch)
            )

    def _batch_alarms(self, batch: KVBatchMeta) -> Iterator[Alarm]:
        prompt_index = batch.prompt_index
        yield from group_alarms(batch.tag(GROUP_ID), prompt_index)
        reasons = [None if outcome == Outcome.trained.value else outcome for outcome in batch.tag(OUTCOME)]
        yield from mask_alarms(batch.tag(SAMPLE_MASK), batch.tag(IS_JUDGED), reasons)
        if self._cfg.grpo.overlong_filtering:
            yield from truncation_alarms(batch.tag(IS_TRUNCATED), batch.tag(SAMPLE_MASK))
        yield from advantage_alarms(batch.tag(ADVANTAGE), self._advantages(batch, prompt_index))

    def _advantages(self, batch: KVBatchMeta, prompt_index: Sequence[int]) -> list[float] | None:
        grpo, loss = self._cfg.grpo, self._cfg.loss_fn
        has_kl = loss.use_kl_in_reward
        return reference_advantages(
            RewardedSamples(
                rewards=batch.tag(SHAPED_REWARD),
                groups=prompt_index,
                trains=[bool(kept) for kept in batch.tag(SAMPLE_MASK)],
                num_tokens=[*map(float, batch.tag(NUM_RESPONSE_TOKENS))],
                components={
                    name: batch.tag(reward_component(name)) for name in grpo.adv_estimator.reward_weights
                },
                kl_coefficient=loss.reference_policy_kl_penalty if has_kl else 0.0,
                kl_sums=batch.tag(KL_SUM) if has_kl else (),
                kl_square_sums=batch.tag(KL_SQUARE_SUM) if has_kl else (),
            ),
            grpo,
        )

    def _count_alarms(self, results: StepResults, measured: Mapping[str, float]) -> Iterator[Alarm]:
        batch = results.batch
        tokens, mask = batch.tag(NUM_RESPONSE_TOKENS), batch.tag(SAMPLE_MASK)
        counts = expected_counts(tokens, mask, self._cfg.policy.train_global_batch_size)
        yield from count_alarms(results.update.planned_counts, counts)
        idle = batch.tag(IS_IDLE) if batch.has_tag(IS_IDLE) else [False] * len(batch)
        num_epochs = self._cfg.grpo.num_epochs_per_rollout
        at_least = sum(
            count for count, kept, skipped in zip(tokens, mask, idle, strict=True) if kept and not skipped
        )
        yield from trained_token_alarms(
            measured.get(Measured.num_trained_tokens),
            num_epochs * at_least,
            num_epochs * sum(count for count, _ in counts),
        )
        yield from sample_alarms(measured.get(Measured.num_wrong_samples, 0.0))

    def _update_alarms(
        self, results: StepResults, metrics: Mapping[str, float], measured: Mapping[str, float]
    ) -> Iterator[Alarm]:
        policy, loss, grpo = self._cfg.policy, self._cfg.loss_fn, self._cfg.grpo
        num_updates = grpo.num_epochs_per_rollout * len(results.batch) // policy.train_global_batch_size
        num_updates -= int(metrics.get("skipped_updates", 0))
        yield from trained_alarms(
            results.update, policy, updates_before=self._num_updates, planned=num_updates
        )
        yield from advantage_digest_alarms(measured)
        yield from first_reference_alarms(measured, policy)
        if isinstance(loss, ClippedLossConfig) and cuts_ratio(loss):
            yield from ratio_alarms(metrics, loss)
        if not self._has_dropout:
            yield from first_ratio_alarms(measured, policy)
        if "entropy" in metrics:
            tokens, mask = results.batch.tag(NUM_RESPONSE_TOKENS), results.batch.tag(SAMPLE_MASK)
            [(num_tokens, _)] = expected_counts(tokens, mask, len(tokens))
            yield from entropy_alarms(metrics, num_tokens)
        yield from token_entropy_alarms(measured)

    def _critic_alarms(self, results: StepResults) -> Iterator[Alarm]:
        """Yield the alarms of a critic's training, which say that they are the critic's."""
        cfg, critic, batch = self._cfg.value, results.critic, results.batch
        if cfg is None or critic is None:
            return
        measured, updates_before = _values(critic.update.measured), self._num_value_updates
        self._num_value_updates = measured.get(Measured.num_updates)
        num_updates = cfg.num_epochs_per_rollout * len(batch) // cfg.train_global_batch_size
        num_updates -= int(_values(critic.update.metrics).get("skipped_updates", 0))
        tokens, mask = batch.tag(NUM_RESPONSE_TOKENS), batch.tag(SAMPLE_MASK)
        counts = expected_counts(tokens, mask, cfg.train_global_batch_size)
        num_tokens = cfg.num_epochs_per_rollout * sum(count for count, _ in counts)
        for alarm in (
            *count_alarms(critic.update.planned_counts, counts),
            *trained_token_alarms(measured.get(Measured.num_trained_tokens), 0, num_tokens),
            *sample_alarms(measured.get(Measured.num_wrong_samples, 0.0)),
            *trained_alarms(critic.update, cfg, updates_before=updates_before, planned=num_updates),
            *value_alarms(measured, cfg),
        ):
            yield replace(alarm, wrong=f"of the critic: {alarm.wrong}")

    def _signal(self, results: StepResults) -> StepSignal:
        batch = results.batch
        return step_signal(
            SignalSamples(
                group_ids=batch.tag(GROUP_ID),
                advantages=mean_advantages(batch),
                rewards=batch.tag(REWARD),
                is_judged=batch.tag(IS_JUDGED),
                trains=[bool(kept) for kept in batch.tag(SAMPLE_MASK)],
                is_truncated=batch.tag(IS_TRUNCATED),
            ),
            _flat_components(_values(results.rollout.metrics)),
            solved_reward=self._cfg.grpo.val_solved_reward,
        )

    @property
    def _has_dropout(self) -> bool:
        lora = self._cfg.policy.lora
        return lora.enabled and lora.dropout > 0


def trained_alarms(
    update: TrainUpdate, cfg: TrainedGroupConfig, *, updates_before: float | None, planned: int
) -> Iterator[Alarm]:
    """Yield the alarms of a group's training phase, which made ``planned`` updates."""
    measured, metrics = _values(update.measured), _values(update.metrics)
    yield from weight_alarms(measured)
    if Measured.num_updates in measured:
        count, scheduler = int(measured[Measured.num_updates]), cfg.scheduler
        rates = scheduled_rates(count, planned, cfg.optimizer.lr, scheduler)
        norm = metrics.get("grad_norm", 0.0)
        yield from change_alarms(measured, cfg, learning_rates=rates, gradient_norm=norm)
    yield from optimizer_alarms(measured, cfg, updates_before, planned)
    yield from group_setting_alarms(measured, cfg)
    yield from setting_alarms(measured, cfg)
    yield from gradient_alarms(measured, update.named, metrics.get("grad_norm"))
    yield from update_alarms(measured, update.named)
    yield from copy_alarms(measured, update.named, cfg)
    yield from restored_alarms(measured, update.named)
    yield from loss_alarms(measured)


def _compared(batch: KVBatchMeta) -> list[bool]:
    """Return which samples dynamic sampling compares: the samples that were judged and that no filter
    refused."""
    pairs = zip(batch.tag(IS_JUDGED), batch.tag(OUTCOME), strict=True)
    return [judged and outcome != Outcome.filtered.value for judged, outcome in pairs]


def _flat_components(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the mean of each component whose values differ in hardly any group, for environments with
    several components.

    The metrics of an older recording lack this, so it gives none.
    """
    return {
        f"{component} of env.{env}": value
        for env, components in reward_components(metrics).items()
        for component, value in components.items()
        if len(components) > 1
        and metrics.get(f"env/{env}/baseline_reward/pct_uniform/{component}", 0.0) >= FLAT_PER_CENT
    }


def _values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}
