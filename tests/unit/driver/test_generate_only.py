"""Steps of a run that only generates, on rollouts that are written down beforehand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from nemo_like.batch.tags import ADVANTAGE
from nemo_like.config.schema import Config
from nemo_like.data.sampler import MixtureSampler
from nemo_like.driver.generate_only import GenerationComponents, GenerationDriver
from tests.unit.driver.scripted_rollout import PARTITION, ScriptedRollout

CRITIC = ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false")
SMALL = ("grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=2", "rollout.dump_period=1")


class OpenPartition:
    """The partition that a scripted rollout has open already."""

    @contextmanager
    def partition(self, name: str) -> Iterator[str]:
        yield PARTITION

    def take_operations(self) -> tuple[()]:
        return ()


class DumpingRollout(ScriptedRollout):
    """A scripted rollout that keeps what it should dump."""

    def dump(self, step: int, ledger: Any) -> None:
        (self.dumped,) = ledger


@pytest.mark.parametrize(("arguments", "has_advantages"), [((), True), (CRITIC, False)])
def test_a_step_reports_rewards_and_has_advantages_unless_a_critic_would_give_them(
    demo: Callable[..., Config], arguments: tuple[str, ...], has_advantages: bool
) -> None:
    rollout: Any = DumpingRollout([[[1.0, 0.0]]])
    nothing: Any = None
    driver = GenerationDriver(
        demo(*SMALL, *arguments),
        GenerationComponents(
            partitions=OpenPartition(),
            rollout=rollout,
            train_sampler=MixtureSampler([8], [1.0], seed=1, shuffle=False),
            logger=nothing,
            observer=nothing,
            recovery=nothing,
        ),
    )
    assert driver.step(1).metrics["train/reward"] == 0.5
    assert rollout.dumped.has_tag(ADVANTAGE) == has_advantages
