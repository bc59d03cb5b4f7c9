"""Which rollouts are under way at which step, with an engine and a data plane that only take notes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.options import StepShape
from nemo_like.configuration import Config
from nemo_like.data.sampler import MixtureSampler
from nemo_like.driver.rollout_schedule import RolloutSchedule
from nemo_like.observability.timers import StageTimer
from nemo_like.rollout.prompts import PromptBatch
from tests.unit.driver.scripted_rollout import AnyOrder

NUM_STEPS = 6


class Notes:
    """Plays every part of a run, and remembers in which order it was asked for what."""

    def __init__(self, cfg: Config, saves_after: tuple[int, ...] = ()) -> None:
        self.told: list[str] = []
        self.begun: list[PromptBatch] = []
        self.open: list[str] = []
        parts: Any = self
        self.schedule = RolloutSchedule(
            cfg,
            partitions=SimpleNamespace(open=self._open, close=self._close),  # type: ignore[arg-type]
            rollout=parts,
            weight_sync=parts,
            sampler=MixtureSampler([100], [1.0], seed=1, shuffle=False),
            journal=AnyOrder(),  # type: ignore[arg-type]
            settles_after=lambda step: step in saves_after,
        )

    digest = None

    def ensure_version(self, version: int) -> dict[str, Any]:
        self.told.append(f"weights {version}")
        return {}

    def end_generation(self) -> None:
        self.told.append("over")

    def begin(self, prompts: PromptBatch, partition: str) -> None:
        assert partition in self.open
        self.told.append(f"begin {prompts.step}")
        self.begun.append(prompts)

    def begin_step(self, step: int) -> None:
        self.told.append(f"step {step}")

    def step(self, step: int, version: int) -> PromptBatch:
        with self.schedule.of_step(step, version, StageTimer()) as rollout:
            self.told.append(f"train {rollout.prompts.step}")
            return rollout.prompts

    def run(self) -> list[PromptBatch]:
        return [self.step(step, step - 1) for step in range(1, NUM_STEPS + 1)]

    def _open(self, name: str) -> None:
        self.open.append(name)

    def _close(self, name: str) -> None:
        self.open.remove(name)


@pytest.fixture
def notes(demo: Callable[..., Config]) -> Callable[..., Notes]:
    def make(max_staleness: int, **options: Any) -> Notes:
        sizes = ("grpo.num_prompts_per_step=4", f"grpo.max_num_steps={NUM_STEPS}")
        return Notes(demo(*sizes, f"grpo.max_staleness={max_staleness}"), **options)

    return make


def test_without_staleness_rollouts_and_training_alternate(notes: Callable[..., Notes]) -> None:
    run = notes(0)
    run.run()
    assert run.told[:6] == ["weights 0", "begin 1", "train 1", "weights 1", "begin 2", "train 2"]
    assert [prompts.newest_version for prompts in run.begun] == [0, 1, 2, 3, 4, 5]


def test_rollouts_run_ahead_by_as_many_versions_as_allowed(notes: Callable[..., Notes]) -> None:
    run = notes(2)
    run.run()
    assert run.told[:7] == ["weights 0", "begin 1", "begin 2", "begin 3", "train 1", "weights 1", "begin 4"]
    assert [prompts.policy_version for prompts in run.begun] == [0, 0, 0, 1, 2, 3]
    assert [prompts.num_steps_ahead for prompts in run.begun] == [0, 1, 2, 2, 2, 2]


def test_samples_that_wait_for_a_step_go_on_once_its_weights_are_there(demo: Callable[..., Config]) -> None:
    sizes = ("grpo.num_prompts_per_step=4", f"grpo.max_num_steps={NUM_STEPS}")
    run = Notes(demo(*sizes, "grpo.max_staleness=1", "rollout.max_tokens_per_step=2"))
    run.run()
    assert run.told[:4] == ["weights 0", "step 1", "begin 1", "begin 2"]
    assert run.told[5:8] == ["weights 1", "step 2", "begin 3"]


@given(max_staleness=st.integers(0, 4), saves_after=st.sets(st.integers(1, NUM_STEPS)))
def test_each_step_trains_on_its_own_prompts_in_the_datas_order_and_none_is_too_old(
    max_staleness: int, saves_after: set[int]
) -> None:
    grpo = SimpleNamespace(
        num_prompts_per_step=4,
        step_shape=StepShape(4, 2),
        rollout_shape=StepShape(4, 2),
        max_num_steps=NUM_STEPS,
        max_staleness=max_staleness,
        overlap=None,
    )
    policy = SimpleNamespace(data_parallel_size=1)
    rollout = SimpleNamespace(max_tokens_per_step=None)
    cfg = SimpleNamespace(grpo=grpo, policy=policy, rollout=rollout)
    run = Notes(cfg, tuple(saves_after))  # type: ignore[arg-type]
    trained = run.run()
    assert [index for prompts in trained for index in prompts.indices] == list(range(4 * NUM_STEPS))
    assert [prompts.step for prompts in trained] == list(range(1, NUM_STEPS + 1))
    for prompts in trained:
        assert prompts.newest_version == prompts.step - 1
        assert 0 <= prompts.num_steps_ahead <= max_staleness
        assert not any(prompts.policy_version < saved < prompts.step for saved in saves_after)
    assert not run.open


def test_no_rollout_begins_before_a_checkpoint_that_its_step_comes_after(
    notes: Callable[..., Notes],
) -> None:
    run = notes(2, saves_after=(2,))
    run.run()
    assert run.told.index("begin 3") > run.told.index("train 2")
    assert run.told.index("begin 2") < run.told.index("train 1")


def test_what_is_under_way_is_saved_and_begins_again_with_the_weights_of_then(
    notes: Callable[..., Notes],
) -> None:
    run, again = notes(2), notes(2)
    run.step(1, 0)
    state = run.schedule.state_dict()
    assert state["under_way"] == [[4, 5, 6, 7], [8, 9, 10, 11]]
    again.schedule.load_state_dict(state)
    assert again.schedule.state_dict() == state
    assert [again.step(step, step - 1).indices[0] for step in (2, 3, 4)] == [4, 8, 12]
    assert [(one.step, one.policy_version, one.num_steps_ahead) for one in again.begun[:3]] == [
        (2, 1, 0),
        (3, 1, 1),
        (4, 1, 2),
    ]


def test_abandoned_rollouts_leave_no_partition_open(notes: Callable[..., Notes]) -> None:
    run = notes(2)
    state = run.schedule.state_dict()
    run.step(1, 0)
    assert run.open == ["train-2", "train-3"]
    run.schedule.abandon("step 2")
    assert not run.open
    run.schedule.load_state_dict(state)
    assert run.step(1, 0).indices == (0, 1, 2, 3)


def test_a_partition_is_closed_when_a_stage_raises(notes: Callable[..., Notes]) -> None:
    run = notes(0)
    with pytest.raises(ZeroDivisionError), run.schedule.of_step(1, 0, StageTimer()):
        raise ZeroDivisionError
    assert not run.open
