"""Watches every rollout for failed rewards: warns once of each kind, and ends a run that has too many."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from nemo_like.driver.run_failures import RewardsFailed
from nemo_like.environments.interface import ABSTAINED_SHARE, UNSAID_SHARE, FailureKind
from nemo_like.environments.options import EnvConfig
from nemo_like.observability.logger import RunLogger
from nemo_like.rollout.prompts import FailedReward, PromptBatch, RolloutResult


class RewardWatch:
    """Counts the samples and failed rewards of each environment over the rollouts of a step or validation."""

    def __init__(self, envs: Mapping[str, EnvConfig], logger: RunLogger, log_path: str) -> None:
        """Take the allowed shares of failed rewards from ``envs``. ``log_path`` is the rollout actor's log,
        which names every failed sample."""
        self._envs, self._logger, self._log_path = envs, logger, log_path
        self._warned: set[tuple[str, FailureKind]] = set()
        self._warned_metrics: set[str] = set()
        self._reasons: dict[tuple[str, FailureKind], str] = {}  # the latest of each kind
        self._num_samples: Counter[str] = Counter()
        self._num_failed: Counter[str] = Counter()
        self._num_of_kind: Counter[tuple[str, FailureKind]] = Counter()

    def check(self, prompts: PromptBatch, result: RolloutResult) -> None:
        """Count a rollout's failed rewards, and warn of the run's first of each kind in each environment.

        Raises RewardsFailed when an environment could not judge more than ``env.<name>.max_failed_share`` of
        its samples in this step or validation so far, refills by dynamic sampling included.
        """
        if prompts.first_group == 0:
            for counts in (self._num_samples, self._num_failed, self._num_of_kind):
                counts.clear()
        where = f"{prompts.mode.name} step {prompts.step}"
        for one in result.failed:
            self._warn_of_failure(one, where)
        for name, env in self._envs.items():
            self._warn_of_silence(name, result, where)
            self._warn_of_unsaid(name, result, where)
            self._count(name, result)
            if self._num_failed[name] > env.max_failed_share * self._num_samples[name]:
                raise RewardsFailed(self._verdict(name, env, where))

    def _warn_of_failure(self, one: FailedReward, where: str) -> None:
        kind = (one.env, one.failure.kind)
        self._reasons[kind] = one.failure.reason
        if kind in self._warned:
            return
        self._warned.add(kind)
        self._logger.warn(
            f"env.{one.env}: no reward for prompt {one.prompt}, sample {one.generation} in {where} "
            f"({one.failure.kind.name}): {one.failure.reason}\n"
            f"such samples do not train and count in no statistics; {self._log_path} names each"
        )

    def _warn_of_silence(self, env: str, result: RolloutResult, where: str) -> None:
        """Warn once of each component that judged no sample of a rollout."""
        prefix = f"env/{env}/{ABSTAINED_SHARE}/"
        for metric, share in result.metrics.items():
            if metric.startswith(prefix) and share.value == 1.0 and metric not in self._warned_metrics:
                self._warned_metrics.add(metric)
                self._logger.warn(
                    f"env.{env}: the component {metric.removeprefix(prefix)} was None for all samples in "
                    f"{where}, so it judged nothing; a function without a return statement returns None too"
                )

    def _warn_of_unsaid(self, env: str, result: RolloutResult, where: str) -> None:
        """Warn once of each environment whose agents begin with responses that the policy did not give."""
        metric = f"env/{env}/{UNSAID_SHARE}"
        share = result.metrics.get(metric)
        if share is not None and share.value > 0 and metric not in self._warned_metrics:
            self._warned_metrics.add(metric)
            self._logger.warn(
                f"env.{env}: {share.value:.0%} of the sessions in {where} begin with responses that the "
                "policy did not give in them and that are not in the task's prompt: examples that the agent "
                "shows it, which is fine, or what its client kept of earlier sessions in a cache, whose "
                "calls do not train; turn such a cache off"
            )

    def _count(self, name: str, result: RolloutResult) -> None:
        def number(metric: str) -> int:
            found = result.metrics.get(f"env/{name}/{metric}")
            return int(found.value) if found else 0

        self._num_samples[name] += number("num_samples")
        self._num_failed[name] += number("num_failed_rewards")
        for kind in FailureKind:
            self._num_of_kind[name, kind] += number(f"num_failed_rewards/{kind.name}")

    def _verdict(self, name: str, env: EnvConfig, where: str) -> str:
        num_failed, num_samples = self._num_failed[name], self._num_samples[name]
        kinds = [
            f"{kind.name} {count} times: {self._reasons.get((of, kind), 'the reason was not recorded')}"
            for (of, kind), count in self._num_of_kind.most_common()
            if of == name and count
        ]
        return (
            f"env.{name} gave no reward for {num_failed} of {num_samples} samples "
            f"({num_failed / num_samples:.0%}) in {where}, and env.{name}.max_failed_share="
            f"{env.max_failed_share:g} allows no more\n"
            + "\n".join(kinds)
            + f"\n{self._log_path} names each sample; correct the environment, or raise the share"
        )
