from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import GROUP_ID, OUTCOME, REWARD, SCALED_REWARD
from nemo_like.configuration import load_config
from nemo_like.driver.collection import Collected, Collection
from nemo_like.driver.run_failures import RunFailed
from nemo_like.rollout.prompts import PromptBatch, RolloutMode
from tests.unit.driver.scripted_rollout import (
    BYTES_PER_SAMPLE,
    NUM_TOKENS,
    PARTITION,
    AnyOrder,
    ScriptedRollout,
)

REPOSITORY = Path(__file__).resolve().parents[3]
Groups = Sequence[Sequence[float | None]]

RIGHT, WRONG, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


@pytest.fixture(scope="module")
def dynamic() -> GRPOConfig:
    overrides = ["grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_max_gen_batches=3"]
    return load_config(REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml", overrides).grpo


@pytest.fixture
def collect(dynamic: GRPOConfig) -> Callable[..., tuple[Collected, ScriptedRollout]]:
    def run(*rollouts: Groups, **changes: object) -> tuple[Collected, ScriptedRollout]:
        rollout = ScriptedRollout(rollouts)
        first = PromptBatch(
            mode=RolloutMode.training,
            step=1,
            policy_version=0,
            indices=tuple(range(len(rollouts[0]))),
            num_generations=2,
        )
        rollout.begin(first, PARTITION)
        collection = Collection(
            first,
            PARTITION,
            rollout=rollout,
            cfg=replace(dynamic, **{"num_prompts_per_step": len(first), **changes}),
            more_prompts=lambda last: replace(last, first_group=last.first_group + len(last)),
            journal=AnyOrder(),
        )
        (whole,) = collection.parts()
        return collection.collected(whole), rollout

    return run


def outcomes(collected: Collected) -> list[set[object]]:
    return [set(batch.tag(OUTCOME)) for batch in collected.dropped]


def test_without_dynamic_sampling_one_rollout_is_kept_as_it_is(collect) -> None:
    collected, rollout = collect([RIGHT, MIXED, WRONG], use_dynamic_sampling=False)
    assert collected.batch.tag(GROUP_ID) == (0, 0, 1, 1, 2, 2)
    assert collected.dropped == ()
    assert rollout.bytes_after_discard == []


def test_uniform_groups_are_replaced_until_exactly_as_many_groups_are_there(collect) -> None:
    collected, rollout = collect([RIGHT, MIXED, WRONG], [WRONG, MIXED, RIGHT], [MIXED, WRONG, MIXED])
    # The third rollout has one good group more than is missing.
    assert collected.batch.tag(GROUP_ID) == (1, 1, 4, 4, 6, 6)
    assert collected.batch.tag(REWARD) == (0.0, 1.0) * 3
    assert [batch.first_group for batch in rollout.asked] == [0, 3, 6]
    assert outcomes(collected) == [{"uniform_group"}] * 3 + [{"surplus_group"}]
    assert set(collected.batch.tag(OUTCOME)) == {"trained"}


def test_a_rollout_of_more_prompts_than_a_step_has_gives_its_first_good_groups(collect) -> None:
    collected, rollout = collect([RIGHT, MIXED, WRONG, MIXED, MIXED], num_prompts_per_step=2)
    assert collected.batch.tag(GROUP_ID) == (1, 1, 3, 3)
    assert collected.num_rollouts == len(rollout.asked) == 1
    assert outcomes(collected) == [{"uniform_group"}, {"surplus_group"}]


def test_the_bytes_of_dropped_groups_are_free_before_the_next_rollout(collect) -> None:
    collected, rollout = collect([RIGHT, MIXED, WRONG], [WRONG, MIXED, RIGHT], [MIXED, WRONG, MIXED])
    kept_samples = [2, 4, 6]
    assert rollout.bytes_after_discard == [count * BYTES_PER_SAMPLE for count in kept_samples]
    assert rollout.plane.host.storage.num_bytes == 6 * BYTES_PER_SAMPLE
    assert [operation.name for operation in collected.operations] == ["clear"] * 3


def test_the_groups_that_are_kept_can_still_be_read(collect) -> None:
    collected, rollout = collect([RIGHT, MIXED], [WRONG, MIXED])
    columns = rollout.plane.fetch(collected.batch, ["input_ids"])
    # The second group of each rollout: its samples 2 and 3.
    expected = [*range(2 * NUM_TOKENS, 4 * NUM_TOKENS)] * 2
    assert columns["input_ids"].tolist() == expected


def test_too_few_good_groups_end_the_run_with_the_reason(collect) -> None:
    with pytest.raises(RunFailed, match=r"found 1 of 2 groups .* in 6 groups.*max_gen_batches=3 allows no"):
        collect([RIGHT, MIXED], [WRONG, WRONG], [RIGHT, RIGHT])


def test_the_last_allowed_rollout_may_complete_the_step(collect) -> None:
    collected, _ = collect([WRONG, WRONG], [WRONG, WRONG], [MIXED, MIXED])
    assert collected.batch.tag(GROUP_ID) == (4, 4, 5, 5)


def test_a_failed_reward_makes_no_difference_within_a_group(collect) -> None:
    collected, _ = collect([[None, 1.0], MIXED], [MIXED, RIGHT])
    assert collected.batch.tag(GROUP_ID) == (1, 1, 2, 2)
    assert collected.dropped[0].tag(OUTCOME) == ("reward_failed", "uniform_group")


def test_the_raw_reward_decides_not_the_shaped_one(collect, dynamic: GRPOConfig) -> None:
    # The whole source range is mapped to one side: scaled rewards are all 1, raw ones differ.
    scaling = replace(dynamic.reward_scaling, enabled=True, source_min=-2.0, source_max=-1.0)
    collected, _ = collect([MIXED], reward_scaling=scaling)
    assert collected.batch.tag(SCALED_REWARD) == (1.0, 1.0)


def test_metrics_and_times_add_up_over_the_rollouts(collect) -> None:
    collected, _ = collect([WRONG], [WRONG], [MIXED])
    assert collected.metrics["total_num_tokens"].value == 3 * 2 * NUM_TOKENS
    assert (collected.generation_s, collected.reward_s, collected.put_s) == (6.0, 1.5, 0.75)
    assert collected.num_rollouts == 3
    assert sum(len(batch) for batch in collected.generated) == 6


def parts_of(cfg: GRPOConfig, rollout: ScriptedRollout, num_groups: int, multiple: int) -> list[KVBatchMeta]:
    first = PromptBatch(
        mode=RolloutMode.training,
        step=1,
        policy_version=0,
        indices=tuple(range(num_groups)),
        num_generations=2,
    )
    rollout.begin(first, PARTITION)
    collection = Collection(
        first,
        PARTITION,
        rollout=rollout,
        cfg=replace(cfg, num_prompts_per_step=num_groups),
        more_prompts=lambda last: replace(last, first_group=last.first_group + len(last)),
        journal=AnyOrder(),
        multiple=multiple,
    )
    return [*collection.parts()]


def test_groups_come_in_parts_as_they_end_and_together_in_their_order(dynamic) -> None:
    rollout = ScriptedRollout([[MIXED] * 5], ends=[3, 0, 4, 2, 1])
    parts = parts_of(replace(dynamic, use_dynamic_sampling=False), rollout, 5, 1)
    assert [part.tag(GROUP_ID) for part in parts] == [(3, 3), (0, 0), (4, 4), (2, 2), (1, 1)]


def test_every_part_but_the_last_has_a_multiple_of_groups(dynamic) -> None:
    rollout = ScriptedRollout([[MIXED] * 5], ends=[3, 0, 4, 2, 1])
    parts = parts_of(replace(dynamic, use_dynamic_sampling=False), rollout, 5, 2)
    assert [part.tag(GROUP_ID) for part in parts] == [(0, 0, 3, 3), (2, 2, 4, 4), (1, 1)]


def test_a_refilled_group_comes_only_when_no_earlier_one_can_take_its_place(dynamic) -> None:
    # Two groups are missing after the first rollout. In the second, group 5 ends first, but 3 and 4 may both
    # turn out good; when 3 is uniform, 4 and 5 are certain.
    rollout = ScriptedRollout([[MIXED, WRONG, RIGHT], [RIGHT, MIXED, MIXED]], ends=[2, 1, 0])
    parts = parts_of(dynamic, rollout, 3, 1)
    assert [part.tag(GROUP_ID) for part in parts] == [(0, 0), (4, 4), (5, 5)]


def test_parts_with_refills_are_the_groups_that_one_part_has(dynamic, collect) -> None:
    rollouts = [RIGHT, MIXED, WRONG], [WRONG, MIXED, RIGHT], [MIXED, WRONG, MIXED]
    parts = parts_of(dynamic, ScriptedRollout(rollouts, ends=[1, 2, 0]), 3, 1)
    whole, _ = collect(*rollouts)
    assert sorted(group for part in parts for group in part.tag(GROUP_ID)) == [*whole.batch.tag(GROUP_ID)]
