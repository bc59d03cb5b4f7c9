"""Steps of a run that only generates, on rollouts that are written down beforehand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.batch.tags import ADVANTAGE
from nemo_like.configuration import Config
from nemo_like.data.sampler import MixtureSampler
from nemo_like.driver.generate_only import GenerationComponents, GenerationDriver
from nemo_like.driver.reports import StepReport
from nemo_like.driver.rollout_schedule import RolloutSchedule
from nemo_like.driver.stopping import StopRequests
from nemo_like.weight_sync.sync import NoEngines
from tests.unit.driver.scripted_rollout import PARTITION, AnyOrder, ScriptedRollout

CRITIC = ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false")
SMALL = ("grpo.num_prompts_per_step=1", "grpo.num_generations_per_prompt=2", "rollout.dump_period=1")


class OpenPartition:
    """The partition that a scripted rollout has open already: that of step 1."""

    def open(self, name: str) -> None:
        assert name == PARTITION

    def close(self, name: str) -> None:
        assert name == PARTITION

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
    order: Any = AnyOrder()
    partitions: Any = OpenPartition()
    cfg = demo(*SMALL, *arguments)
    driver = GenerationDriver(
        cfg,
        GenerationComponents(
            partitions=partitions,
            rollout=rollout,
            schedule=RolloutSchedule(
                cfg,
                partitions=partitions,
                rollout=rollout,
                weight_sync=NoEngines(),
                sampler=MixtureSampler([8], [1.0], seed=1, shuffle=False),
                journal=order,
                settles_after=lambda step: False,
            ),
            logger=nothing,
            observer=nothing,
            recovery=nothing,
            stop_requests=nothing,
        ),
    )
    assert driver.step(1).metrics["train/reward"] == 0.5
    assert rollout.dumped.has_tag(ADVANTAGE) == has_advantages


@pytest.mark.parametrize(("num_steps", "ended"), [(80, "on_step returned False after step 2"), (2, None)])
def test_a_callback_ends_a_run_that_trains_nothing_too(
    demo: Callable[..., Config], num_steps: int, ended: str | None
) -> None:
    cfg = demo("checkpointing.enabled=false", f"grpo.max_num_steps={num_steps}")
    logged: list[int] = []
    parts: Any = SimpleNamespace(
        stop_requests=StopRequests(cfg.checkpointing, lambda step, metrics: step < 2),
        recovery=SimpleNamespace(completed=lambda name, version, work: StepReport({"train/reward": 0.5})),
        logger=SimpleNamespace(log_step=lambda step, metrics: logged.append(step), flush=lambda step: None),
    )
    assert GenerationDriver(cfg, parts).run() == ended
    assert logged == [1, 2]
