"""Which samples an excerpt keeps, and of which steps there is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.configuration import Config
from nemo_like.data.interface import TaskPrompt
from nemo_like.rollout.conversation import Conversation, Limits
from nemo_like.rollout.excerpt import Excerpt, excerpt_of, spread
from nemo_like.rollout.options import RolloutConfig, dumps_all_of, dumps_rollouts_of
from nemo_like.rollout.prompts import PromptBatch, RolloutMode


@pytest.fixture
def rollout(demo: Callable[..., Config]) -> RolloutConfig:
    return demo().rollout


@pytest.mark.parametrize(
    ("num_groups", "num_generations", "max_samples", "positions", "kept_of_each"),
    [
        (128, 8, 32, {0, 32, 64, 96}, 8),  # the demo's steps: four whole groups
        (10, 8, 32, {0, 2, 5, 7}, 8),  # 0, 10 / 4, 20 / 4, 30 / 4, rounded down
        (3, 8, 32, {0, 1, 2}, 8),  # all of it
        (128, 12, 32, {0, 64}, 12),  # two groups of 12 fit; 8 of a third would be no whole group
        (4, 64, 32, {0}, 32),  # the limit does not allow a whole group
        (200, 1, 64, {number * 200 // 64 for number in range(64)}, 1),
        (8, 8, 0, set(), 0),
    ],
)
def test_an_excerpt_has_whole_groups_that_are_evenly_spread(
    num_groups: int, num_generations: int, max_samples: int, positions: set[int], kept_of_each: int
) -> None:
    assert spread(num_groups, num_generations, max_samples) == Excerpt(frozenset(positions), kept_of_each)


def prompts(step: int, mode: RolloutMode = RolloutMode.training, first_group: int = 0) -> PromptBatch:
    indices = tuple(range(128))
    return PromptBatch(
        mode=mode, step=step, policy_version=0, indices=indices, num_generations=8, first_group=first_group
    )


def test_every_tenth_step_has_an_excerpt_and_dump_period_keeps_its_meaning(rollout: RolloutConfig) -> None:
    steps = range(1, 21)
    assert [step for step in steps if dumps_rollouts_of(step, rollout)] == [10, 20]
    assert not any(dumps_all_of(step, rollout) for step in steps)
    whole = replace(rollout, dump_period=5)
    assert [step for step in steps if dumps_rollouts_of(step, whole)] == [5, 10, 15, 20]
    assert len(excerpt_of(prompts(10), whole).positions) == 128
    mixed = replace(rollout, dump_period=6, excerpt_period=4)
    assert [step for step in steps if dumps_rollouts_of(step, mixed)] == [4, 6, 8, 12, 16, 18, 20]
    assert [len(excerpt_of(prompts(step), mixed).positions) for step in (4, 12)] == [4, 128]
    none = replace(rollout, excerpt_period=0)
    assert not any(dumps_rollouts_of(step, none) for step in steps)


def test_a_replay_has_no_excerpt(rollout: RolloutConfig) -> None:
    assert not dumps_rollouts_of(10, replace(rollout, replay="recorded"))


def test_further_rollouts_of_a_step_add_nothing_to_its_excerpt(rollout: RolloutConfig) -> None:
    assert excerpt_of(prompts(10, first_group=128), rollout) == Excerpt(frozenset(), 0)


def test_a_validation_has_an_excerpt_unless_all_of_it_is_dumped(rollout: RolloutConfig) -> None:
    asked = prompts(0, RolloutMode.validation)
    assert sorted(excerpt_of(asked, rollout).positions) == [0, 16, 32, 48, 64, 80, 96, 112]
    assert len(excerpt_of(asked, replace(rollout, dump_validation=True)).positions) == 128
    assert not excerpt_of(asked, replace(rollout, excerpt_validation_samples=0)).positions


def test_an_excerpt_cuts_a_part_of_a_rollout_to_its_samples() -> None:
    groups = [
        [Conversation(TaskPrompt("", ""), (1,), 0, one, Limits(max_turns=1, max_tokens=9), seed=0)
         for one in range(3)]
        for _ in range(3)
    ]  # fmt: skip
    batch = KVBatchMeta(
        partition="train-10",
        chunks=tuple(Chunk(key, (4, 4, 4)) for key in "abc"),
        rows=tuple((chunk, row) for chunk in range(3) for row in range(3)),
        columns=frozenset(),
    )
    kept = Excerpt(frozenset({4, 9}), 2).of(batch, groups, [4, 5, 9])
    assert kept.batch.sample_ids == ("a/0", "a/1", "c/0", "c/1")
    assert [[one.generation for one in group] for group in kept.groups] == [[0, 1], [0, 1]]
    assert kept.positions == [4, 9]
    assert len(Excerpt(frozenset(), 0).of(batch, groups, [4, 5, 9]).batch) == 0
