"""What scripts/chaos.py does to runs: drawn from the seed alone, and so that each moment can come."""

from __future__ import annotations

from tests.chaos.plan import NUM_STEPS, Disturbance, Phase, draw_plan
from tests.chaos.victims import Role

PLANS = [draw_plan(1, run, num_disturbances=5) for run in range(400)]


def flat(plans: list[tuple[Disturbance, ...]]) -> list[Disturbance]:
    return [disturbance for plan in plans for disturbance in plan]


def test_a_seed_and_a_number_of_the_run_fix_its_plan() -> None:
    assert draw_plan(3, 7, num_disturbances=5) == draw_plan(3, 7, num_disturbances=5)
    assert len({draw_plan(seed, run, num_disturbances=5) for seed in (1, 2) for run in (0, 1)}) == 4


def test_steps_come_in_their_order_and_before_the_last() -> None:
    for plan in PLANS:
        steps = [one.moment.step for one in plan if one.moment.phase is Phase.step]
        assert steps == sorted(steps)
        assert all(1 <= step < NUM_STEPS - 1 for step in steps)


def test_the_start_is_disturbed_first_or_after_what_ends_the_driver() -> None:
    num_at_start = 0
    for plan in PLANS:
        for before, one in zip((None, *plan), plan, strict=False):
            if one.moment.phase is Phase.start:
                num_at_start += 1
                assert before is None or before.ends_driver
    assert num_at_start > 50


def test_every_role_is_hit_and_only_a_driver_that_is_stopped_goes_on_always() -> None:
    blows = [blow for one in flat(PLANS) for blow in one.blows]
    assert {blow.role for blow in blows} == set(Role)
    stopped_for_good = {blow.role for blow in blows if blow.signal == "SIGSTOP" and blow.pause_s is None}
    assert stopped_for_good == set(Role) - {Role.driver, Role.terminal}


def test_two_processes_are_hit_at_once_now_and_then() -> None:
    assert 0.1 < sum(len(one.blows) == 2 for one in flat(PLANS)) / len(flat(PLANS)) < 0.2
