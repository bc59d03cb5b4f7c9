from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from nemo_like.driver.reward_watch import RewardWatch
from nemo_like.driver.run_failures import RewardsFailed
from nemo_like.environments.interface import Failure, FailureKind
from nemo_like.observability.metrics import Metric, mean, summed
from nemo_like.rollout.prompts import FailedReward, PromptBatch, RolloutMode, RolloutResult
from tests.unit.driver.test_validation import answered
from tests.unit.environments.configs import env_config

Watched = tuple[RewardWatch, list[str]]


class Warnings:
    """A logger that keeps what it is told."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def warn(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def watched() -> Callable[..., Watched]:
    """``watched(max_failed_share=0.5)``: a watch over the environment "sums", and its warnings."""

    def build(**changes: float) -> Watched:
        logger, envs = Warnings(), {"sums": env_config("arithmetic", **changes)}
        return RewardWatch(envs, logger, "runs/x/logs/rollout.log"), logger.texts  # type: ignore[arg-type]

    return build


def prompts(step: int = 1, first_group: int = 0) -> PromptBatch:
    return PromptBatch(RolloutMode.training, step, 0, (7, 8), 2, first_group)


def failing(num_samples: int, kinds: Mapping[str, int], env: str = "sums") -> RolloutResult:
    """A rollout of which so many samples failed, by kind."""
    metrics: dict[str, Metric] = {
        f"env/{env}/num_samples": summed(num_samples),
        f"env/{env}/num_failed_rewards": summed(sum(kinds.values())),
        **{f"env/{env}/num_failed_rewards/{kind}": summed(count) for kind, count in kinds.items()},
    }
    failed = [FailedReward(env, Failure(FailureKind[kind], f"it {kind}"), 7, 1) for kind in kinds]
    return replace(answered([0.0]), metrics=metrics, failed=failed)


def test_a_component_that_abstains_for_all_samples_is_told_of_once(watched: Callable[..., Watched]) -> None:
    watch, warnings = watched()
    shares = {"style": mean(3, 4), "correct": mean(4, 4)}
    for step in (1, 2):
        found = {f"env/sums/abstained_share/{name}": share for name, share in shares.items()}
        result = failing(4, {})
        watch.check(prompts(step), replace(result, metrics={**result.metrics, **found}))
    (warning,) = warnings
    assert "env.sums: the component correct was None for all samples in training step 1" in warning


def test_sessions_that_begin_with_what_the_policy_never_said_are_told_of_once(
    watched: Callable[..., Watched],
) -> None:
    watch, warnings = watched()
    for step, share in enumerate((0.0, 1.0, 2.0)):
        found = {"env/sums/unsaid_share": mean(share, 4)}
        result = failing(4, {})
        watch.check(prompts(step), replace(result, metrics={**result.metrics, **found}))
    (warning,) = warnings
    assert "env.sums: 25% of the sessions in training step 1 begin with responses that the policy" in warning


def test_the_first_failure_of_a_kind_is_told_with_sample_and_reason_and_no_later_one(
    watched: Callable[..., Watched],
) -> None:
    watch, warnings = watched()
    watch.check(prompts(1), failing(100, {"raised": 2}))
    watch.check(prompts(2), failing(100, {"raised": 2, "died": 1}))
    watch.check(prompts(3), failing(100, {"raised": 2, "died": 1}))
    assert [text.splitlines()[0] for text in warnings] == [
        "env.sums: no reward for prompt 7, sample 1 in training step 1 (raised): it raised",
        "env.sums: no reward for prompt 7, sample 1 in training step 2 (died): it died",
    ]
    assert "runs/x/logs/rollout.log" in warnings[0]


def test_as_many_failures_as_the_share_allows_go_on_and_one_more_ends_the_run(
    watched: Callable[..., Watched],
) -> None:
    watch, _ = watched(max_failed_share=0.5)
    watch.check(prompts(1), failing(10, {"raised": 5}))
    with pytest.raises(RewardsFailed) as failed:
        watch.check(prompts(2), failing(10, {"raised": 4, "died": 2}))
    assert str(failed.value).splitlines() == [
        "env.sums gave no reward for 6 of 10 samples (60%) in training step 2, and "
        "env.sums.max_failed_share=0.5 allows no more",
        "raised 4 times: it raised",
        "died 2 times: it died",
        "runs/x/logs/rollout.log names each sample; correct the environment, or raise the share",
    ]


def test_a_refill_counts_with_the_rollouts_of_its_step(watched: Callable[..., Watched]) -> None:
    watch, _ = watched(max_failed_share=0.5)
    watch.check(prompts(1), failing(10, {"raised": 4}))
    watch.check(prompts(1, first_group=2), failing(10, {"raised": 6}))
    with pytest.raises(RewardsFailed, match="11 of 20 samples"):
        watch.check(prompts(1, first_group=4), failing(0, {"raised": 1}))
    # The step is done again, or is the next one.
    watch.check(prompts(1), failing(10, {"raised": 5}))


@pytest.mark.parametrize(("share", "num_failed"), [(0.0, 0), (1.0, 10)])
def test_a_share_of_0_allows_no_failure_and_one_of_1_allows_all(
    watched: Callable[..., Watched], share: float, num_failed: int
) -> None:
    watch, _ = watched(max_failed_share=share)
    watch.check(prompts(1), failing(10, {"raised": num_failed}))
    if share == 0.0:
        with pytest.raises(RewardsFailed, match="1 of 10 samples"):
            watch.check(prompts(2), failing(10, {"raised": 1}))


def test_each_environment_has_its_own_share(watched: Callable[..., Watched]) -> None:
    watch, warnings = watched()
    watch.check(prompts(1), failing(10, {"raised": 10}, env="of another configuration"))
    assert len(warnings) == 1
