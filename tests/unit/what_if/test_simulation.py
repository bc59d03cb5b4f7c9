"""Simulated runs, by hand and by the laws that hold for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.options import WeightUpdates
from nemo_like_tools.what_if.simulation import Simulation
from nemo_like_tools.what_if.workload import (
    EngineSpeed,
    GroupWork,
    Mode,
    Pauses,
    SampleWork,
    Simulated,
    Split,
    StepWork,
    TrainerSpeed,
    TurnWork,
)

# Any number of sequences at the same pace, a token a second.
ENGINE = EngineSpeed(request_s=0.0, token_s=1.0, token_per_sequence_s=0.0, max_num_seqs=1000)
ONE_BY_ONE = EngineSpeed(request_s=0.0, token_s=1.0, token_per_sequence_s=0.0, max_num_seqs=1)
TRAINER = TrainerSpeed(
    num_replicas=1, updates_per_step=1, optimizer_share=0.0, weight_sync_s=0.0, num_stage_calls=1
)
ONE_EACH = Split(1, 1)
EXACT = Mode(is_exact_overlap=True)


def ahead(k: int, updates: WeightUpdates = WeightUpdates.in_flight) -> Mode:
    return Mode(max_staleness=k, weight_updates=updates)


def group(*samples: tuple[int, float]) -> GroupWork:
    """Samples of one turn each: tokens, and seconds for which they are judged."""
    return GroupWork(
        tuple(SampleWork(10, (TurnWork(tokens, judge_s),)) for tokens, judge_s in samples), False
    )


def work(groups: Sequence[GroupWork], training_s: float, **more: float) -> StepWork:
    values = {"begin_s": 0.0, "put_s": 0.0, "scoring_s": 0.0, "calls_s": 0.0, "driver_s": 0.0, **more}
    return StepWork(rollouts=(tuple(groups),), training_s=training_s, **values)


def simulated(
    works: Sequence[StepWork],
    mode: Mode,
    num_steps: int = 6,
    *,
    engine: EngineSpeed = ENGINE,
    trainer: TrainerSpeed = TRAINER,
    split: Split = ONE_EACH,
    pauses: Pauses | None = None,
) -> Simulated:
    return Simulation(works, engine, trainer, mode=mode, split=split, pauses=pauses).run(num_steps)


# A rollout takes 2 s of tokens and 4 s of judging, training 3 s.
PLAIN = work([group((2, 4.0)), group((2, 1.0))], training_s=3.0)


def test_a_synchronous_step_is_generation_and_training_one_after_the_other() -> None:
    result = simulated([PLAIN], Mode())
    assert result.ends_s == (9.0, 18.0, 27.0, 36.0, 45.0, 54.0)
    assert result.step_s == 9.0
    assert result.engine_idle_share == pytest.approx(7 / 9)
    assert result.trainer_idle_share == pytest.approx(6 / 9)
    assert (result.mean_staleness, result.max_staleness) == (0.0, 0)


def test_one_version_ahead_two_steps_share_the_time_from_prompts_to_weights() -> None:
    # Steps 1 and 2 begin at 0 and train until 9 and 12. Step 3 begins at 9, with the weights of step 1, and
    # trains from 15 to 18; step 4 begins at 12 and trains from 18 to 21.
    result = simulated([PLAIN], ahead(1))
    assert result.ends_s == (9.0, 12.0, 18.0, 21.0, 27.0, 30.0)
    # Of the seven rollouts that began, the first one is not stale.
    assert (result.mean_staleness, result.max_staleness) == (pytest.approx(6 / 7), 1)


@pytest.mark.parametrize("is_one_request", [False, True])
def test_a_rollout_that_is_ahead_gets_no_more_tokens_than_its_budget(is_one_request: bool) -> None:
    # Of step 2's four tokens the first comes while step 1 is under way, from 0 to 7 s, and the others from 7
    # to 10 s, before 3 s of training; every later step does the same.
    one = replace(group((4, 0.0)), is_one_request=is_one_request)
    mode = replace(ahead(1, WeightUpdates.between_samples), max_tokens_per_step=1)
    result = simulated([work([one], training_s=3.0)], mode, num_steps=4)
    assert result.ends_s == (7.0, 13.0, 19.0, 25.0)
    assert result.max_staleness == 1


def test_far_enough_ahead_the_trainer_never_waits() -> None:
    result = simulated([PLAIN], ahead(4), num_steps=12)
    assert result.step_s == 3.0
    assert result.ends_s[-1] == 6.0 + 12 * 3.0


def test_exact_overlap_trains_on_what_has_ended_while_the_rest_is_judged() -> None:
    # The second group ends at 3 s, and half of the training is done at 4.5 s; the first one ends at 6 s.
    result = simulated([PLAIN], EXACT)
    assert result.step_s == 7.5


def test_with_exact_overlap_the_optimizer_and_later_updates_come_after_the_last_group() -> None:
    # The first of two updates takes 1.5 s, of which 0.5 x 1.5 s are the optimizer's.
    trainer = TrainerSpeed(
        num_replicas=1, updates_per_step=2, optimizer_share=0.5, weight_sync_s=0.0, num_stage_calls=1
    )
    result = simulated([PLAIN], EXACT, trainer=trainer)
    assert result.step_s == pytest.approx(6.0 + 0.375 + (3.0 - 0.75))


def test_weights_calls_puts_and_the_driver_take_their_time() -> None:
    trainer = TrainerSpeed(
        num_replicas=1, updates_per_step=1, optimizer_share=0.0, weight_sync_s=0.25, num_stage_calls=2
    )
    one = work([group((2, 4.0))], training_s=3.0, put_s=0.5, scoring_s=1.0, calls_s=0.2, driver_s=0.05)
    assert simulated([one], Mode(), trainer=trainer).step_s == pytest.approx(
        6 + 3 + 0.25 + 0.5 + 1 + 0.2 + 0.05
    )


def test_twice_the_replicas_halve_scoring_and_training() -> None:
    one = work([group((2, 4.0))], training_s=3.0, scoring_s=1.0)
    assert simulated([one], Mode(), split=Split(1, 2)).step_s == 8.0


def test_engines_share_the_groups_by_turns() -> None:
    one = work([group((2, 0.0)), group((3, 0.0)), group((4, 0.0))], training_s=1.0)
    assert simulated([one], Mode(), engine=ONE_BY_ONE).step_s == 2 + 3 + 4 + 1
    assert simulated([one], Mode(), engine=ONE_BY_ONE, split=Split(2, 1)).step_s == 2 + 4 + 1


def test_refills_of_dynamic_sampling_follow_each_other() -> None:
    first, refill = (group((2, 1.0)),), (group((4, 1.0)),)
    one = StepWork(
        rollouts=(first, refill),
        begin_s=0.0,
        put_s=0.0,
        scoring_s=0.0,
        training_s=1.0,
        calls_s=0.0,
        driver_s=0.0,
        wasted_share=0.5,
    )
    result = simulated([one], Mode())
    assert (result.step_s, result.wasted_share) == (9.0, 0.5)
    # Ahead, the first rollout of step 2 has ended at 3; its refill begins when step 2 asks for it, at 9.
    assert simulated([one], ahead(1), 3).ends_s == (9.0, 15.0, 21.0)


def test_turns_of_a_sample_follow_each_other() -> None:
    talk = GroupWork((SampleWork(20, (TurnWork(2, 1.0), TurnWork(3, 0.5))),), False)
    assert simulated([work([talk], training_s=1.0)], Mode()).step_s == 2 + 1 + 3 + 0.5 + 1


def test_a_group_of_one_request_comes_with_its_longest_response() -> None:
    samples = (SampleWork(10, (TurnWork(2, 1.0),)), SampleWork(10, (TurnWork(5, 1.0),)))
    assert simulated([work([GroupWork(samples, True)], training_s=1.0)], Mode()).step_s == 7.0


def test_exact_overlap_gives_every_replica_equally_many_groups() -> None:
    # Groups end at 1, 2 and 6 s and are a second of training each, half a second on two replicas. The first
    # two train from 2 s to 3 s, the last one alone from 6 s on.
    one = work([group((1, 0.0)), group((1, 1.0)), group((1, 5.0))], training_s=3.0)
    result = simulated([one], EXACT, split=Split(1, 2))
    assert result.step_s == pytest.approx(6.5)
    waiting = work([group((1, 0.0)), group((1, 5.0)), group((1, 5.0))], training_s=3.0)
    assert simulated([waiting], EXACT, split=Split(1, 2)).step_s == pytest.approx(7.5)


def test_groups_left_of_a_part_wait_for_as_many_more_as_a_part_has() -> None:
    # On two replicas two groups train for 4 s: two from 1 s and two of the next three from 5 s. The fifth
    # waits, although the sixth ends at 9.5 s, until the seventh has ended: at 20 s. The last two follow.
    judged_s = (0.0, 0.0, 1.0, 1.0, 1.0, 8.5, 19.0, 19.0)
    one = work([group((1, seconds)) for seconds in judged_s], training_s=32.0)
    assert simulated([one], EXACT, split=Split(1, 2)).step_s == pytest.approx(28.0)


def test_what_is_left_at_the_end_is_a_part_of_its_own() -> None:
    # Two groups train for 1 s and one for 0.5 s, each part with the calls, which come once more at the end.
    one = work([group((1, 0.0))] * 3, training_s=3.0, calls_s=0.25)
    assert simulated([one], EXACT, split=Split(1, 2)).step_s == pytest.approx(1 + 1.25 + 0.75 + 0.25)


def test_no_rollout_begins_before_a_checkpoint_of_an_earlier_step_is_saved() -> None:
    # As without pauses until step 2 has ended at 12 and is saved at 14; then steps 3 and 4 begin.
    trainer = TrainerSpeed(
        num_replicas=1,
        updates_per_step=1,
        optimizer_share=0.0,
        weight_sync_s=0.0,
        num_stage_calls=1,
        checkpoint_s=2.0,
    )
    result = simulated([PLAIN], ahead(1), 4, trainer=trainer, pauses=Pauses(checkpoint_period=2))
    assert result.ends_s == (9.0, 14.0, 23.0, 28.0)


def test_rollouts_go_on_during_a_validation() -> None:
    # As without one, but for the 2 s after step 3. With one after each step, step 1 is validated at 11, when
    # step 2 has ended: it trains until 14 and is validated at 16. Step 3, begun at 11, trains from 17 to 20.
    trainer = replace(TRAINER, validation_s=2.0)
    result = simulated([PLAIN], ahead(1), 3, trainer=trainer, pauses=Pauses(validation_period=3))
    assert result.ends_s == (9.0, 12.0, 20.0)
    often = simulated([PLAIN], ahead(1), 3, trainer=trainer, pauses=Pauses(validation_period=1))
    assert often.ends_s == (11.0, 16.0, 22.0)


def test_between_samples_the_trainer_waits_until_the_engine_has_drained() -> None:
    # Step 1 is trained at 4. Step 2 runs until 8, so version 1 comes at 8; in flight it comes at 4.
    works = [work([group((3, 0.0))], training_s=1.0), work([group((8, 0.0))], training_s=1.0)]
    drained = simulated(works, ahead(1, WeightUpdates.between_samples), 2)
    in_flight = simulated(works, ahead(1), 2)
    assert drained.ends_s == in_flight.ends_s == (4.0, 9.0)
    assert drained.mean_staleness > in_flight.mean_staleness


lengths = st.integers(min_value=1, max_value=20)
seconds = st.integers(min_value=0, max_value=40).map(lambda value: value / 4)
groups = st.lists(st.tuples(lengths, seconds), min_size=1, max_size=3).map(lambda samples: group(*samples))
step_works = st.builds(
    work, st.lists(groups, min_size=1, max_size=4), seconds.map(lambda value: value + 0.25)
)
all_works = st.lists(step_works, min_size=1, max_size=4)
all_modes = st.builds(
    Mode,
    is_exact_overlap=st.booleans(),
    max_staleness=st.integers(min_value=0, max_value=4),
    weight_updates=st.sampled_from(WeightUpdates),
)


@given(all_works, st.integers(min_value=0, max_value=4))
def test_running_further_ahead_never_takes_longer_where_samples_do_not_slow_each_other(
    works: list[StepWork], k: int
) -> None:
    assert simulated(works, ahead(k + 1)).total_s <= simulated(works, ahead(k)).total_s + 1e-6


@given(all_works)
def test_exact_overlap_never_takes_longer_where_calls_cost_nothing(works: list[StepWork]) -> None:
    assert simulated(works, EXACT).total_s <= simulated(works, Mode()).total_s + 1e-6


@given(all_works, all_modes, st.booleans())
def test_no_mode_beats_the_longer_of_generation_and_training(
    works: list[StepWork], mode: Mode, one_by_one: bool
) -> None:
    num_steps = len(works)
    result = simulated(works, mode, num_steps, engine=ONE_BY_ONE if one_by_one else ENGINE)
    training_s = sum(one.training_s for one in works)
    tokens = sum(
        turn.num_tokens for one in works for each in one.groups for s in each.samples for turn in s.turns
    )
    slowest = max(
        turn.num_tokens + turn.judge_s
        for one in works
        for g in one.groups
        for s in g.samples
        for turn in s.turns
    )
    assert result.total_s >= training_s - 1e-6
    assert result.total_s >= slowest - 1e-6
    if one_by_one:
        assert result.total_s >= tokens - 1e-6


@given(all_works, all_modes)
def test_no_token_is_staler_than_the_bound_and_shares_are_shares(works: list[StepWork], mode: Mode) -> None:
    result = simulated(works, mode)
    assert 0 <= result.mean_staleness <= result.max_staleness <= mode.max_staleness
    assert -1e-9 <= result.engine_idle_share <= 1
    assert -1e-9 <= result.trainer_idle_share <= 1
    assert list(result.ends_s) == sorted(result.ends_s)


@given(all_works, all_modes, st.integers(min_value=0, max_value=3))
def test_every_run_ends_also_with_pauses(works: list[StepWork], mode: Mode, period: int) -> None:
    pauses = Pauses(validation_period=period, checkpoint_period=2 * period)
    assert len(simulated(works, mode, pauses=pauses).ends_s) == 6
