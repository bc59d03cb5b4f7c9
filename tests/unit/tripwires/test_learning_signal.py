"""Whether a run has anything to learn from: steps by hand, and steps of runs that learn."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from nemo_like.tripwires.alarm import Alarm
from nemo_like.tripwires.learning_signal import LearningSignal, SignalSamples, StepSignal, step_signal

UNIFORM, MIXED, SOLVED = [0.1, 0.1], [0.1, 1.0], [1.0, 1.0]


def step(
    groups: Sequence[Sequence[float | None]],
    *,
    truncated: float = 0.0,
    masks: bool = False,
    levels: bool = False,
    components: dict[str, float] | None = None,
) -> StepSignal:
    """A step whose groups have these rewards; None failed. Advantages are those of GRPO, or 0 where samples
    are masked, or rewards were made equal."""
    group_ids = [number for number, group in enumerate(groups) for _ in group]
    rewards = [reward for group in groups for reward in group]
    advantages = []
    for group in groups:
        judged = [reward for reward in group if reward is not None]
        mean = sum(judged) / max(len(judged), 1)
        spreads = len(set(judged)) > 1 and not masks and not levels
        advantages += [reward - mean if spreads and reward is not None else 0.0 for reward in group]
    samples = SignalSamples(
        group_ids=group_ids,
        advantages=advantages,
        rewards=[reward or 0.0 for reward in rewards],
        is_judged=[reward is not None for reward in rewards],
        trains=[reward is not None and not masks for reward in rewards],
        is_truncated=[place < truncated * len(rewards) for place in range(len(rewards))],
    )
    return step_signal(samples, components or {}, solved_reward=1.0)


def watch(*steps: StepSignal, resumed: bool = False) -> list[tuple[int, Alarm]]:
    """Every warning, with the number of its step."""
    signal = LearningSignal(solved_reward=1.0)
    if resumed:
        signal.resume()
    return [(number, alarm) for number, one in enumerate(steps, 1) for alarm in signal.alarms(one)]


def test_a_step_is_summed_up_by_its_groups() -> None:
    found = step([[0.1, 0.1], [0.0, 1.0], [1.0, None], [None, None]], truncated=0.5)
    assert (found.num_groups, found.num_idle, found.num_solved, found.num_masked) == (4, 3, 1, 0)
    assert (found.num_samples, found.num_truncated) == (8, 4)
    assert found.rewards == [0.1, 0.1, 0.0, 1.0, 1.0]
    masked, levelled = step([MIXED, UNIFORM], masks=True), step([MIXED, UNIFORM], levels=True)
    assert (masked.num_masked, masked.num_levelled) == (1, 0)
    assert (levelled.num_masked, levelled.num_levelled) == (0, 1)


def test_a_run_that_learns_nothing_is_told_so_once_with_numbers_and_remedies() -> None:
    flat = {"correct of env.math": 0.0}
    stuck = step([UNIFORM] * 31 + [[0.1, 0.2]], truncated=1.0, components=flat)
    ((number, alarm),) = watch(*[stuck] * 20)
    assert number == 3
    assert alarm.tripwire == "constant_reward"
    assert not alarm.ends_run
    assert alarm.wrong == (
        "96.9% of the groups (93 of 96 in the latest 3 steps) have equal rewards, and nothing is learned "
        "from them; 100% of the responses are truncated: raise generation.max_new_tokens; components of the "
        "reward that differ within nearly no group: correct of env.math (mean 0): see whether responses can "
        "earn more, and whether the functions notice"
    )
    assert "scripts/show_rollouts.py" in alarm.look_at


@pytest.mark.parametrize(
    ("groups", "remedy"),
    [
        ([[0.0, 0.0]], "0%: see whether the environment recognises right answers, or take easier prompts"),
        ([SOLVED], "100%: take harder prompts"),
        ([SOLVED, [0.0, 0.0]], "50%: take prompts that the policy solves sometimes"),
    ],
)
def test_each_cause_has_its_remedy(groups: list[list[float]], remedy: str) -> None:
    percent, _, what = remedy.partition(":")
    solve = f"{percent} of the responses solve their prompts:{what}"
    ((_, alarm),) = watch(*[step([*groups * 40, [0.0, 1.0]])] * 3)
    assert what in alarm.wrong
    # Also of few groups, where no reward of the first three steps differs from another.
    few = watch(*[step(groups)] * 3)
    assert [number for number, alarm in few if solve in alarm.wrong] == [3] * (len(groups) == 1)


def test_a_component_must_be_flat_in_all_of_the_steps() -> None:
    flat = {"style of env.math": 0.5}
    stuck = [step([UNIFORM] * 32, components=one) for one in (flat, {}, flat)]
    ((_, alarm),) = watch(*stuck)
    assert "style" not in alarm.wrong


def test_masks_can_leave_nothing_to_learn_from_rewards_that_differ() -> None:
    ((_, alarm),) = watch(*[step([MIXED] * 30, truncated=1.0, masks=True)] * 3)
    assert "have no advantage but 0, since masks leave nothing to compare" in alarm.wrong
    assert "100% of the responses are truncated: raise generation.max_new_tokens" in alarm.wrong


def test_scaling_and_shaping_can_make_rewards_equal_that_differ() -> None:
    ((_, alarm),) = watch(*[step([MIXED] * 30, levels=True)] * 3)
    assert "since grpo.reward_scaling or reward_shaping makes their rewards equal" in alarm.wrong


def test_few_groups_may_be_idle_by_chance() -> None:
    few = step([UNIFORM] * 3 + [[0.2, 0.2]])
    found = watch(*[few] * 20)
    assert [number for number, _ in found] == [16]  # 64 groups
    assert watch(*[step([UNIFORM] * 500 + [MIXED])] * 2) == []  # two steps


@pytest.mark.parametrize(("num_mixed", "is_told"), [(4, False), (3, True)])
def test_nineteen_of_twenty_groups_are_nearly_all(num_mixed: int, is_told: bool) -> None:
    steps = [
        step([UNIFORM] * 20),
        step([UNIFORM] * 20),
        step([UNIFORM] * (24 - num_mixed) + [MIXED] * num_mixed),
    ]
    assert bool(watch(*steps)) is is_told  # 60 or 61 of 64


def test_groups_that_a_run_has_learned_to_solve_are_no_reason_to_warn() -> None:
    early, late = step([UNIFORM] * 20 + [MIXED] * 20), step([SOLVED] * 40)
    assert watch(*[early] * 3, *[late] * 10) == []
    # Also where no reward counts as solved, since rewards have risen.
    low = step([[0.1, 0.1]] * 20 + [[0.1, 0.5]] * 20)
    assert watch(*[low] * 3, *[step([[0.5, 0.5]] * 40)] * 10) == []


def test_a_run_that_loses_what_it_had_is_warned_of() -> None:
    early, collapsed = step([UNIFORM] * 20 + [MIXED] * 20), step([[0.0, 0.0]] * 40)
    ((number, alarm),) = watch(*[early] * 5, *[collapsed] * 5)
    assert number == 8
    assert "100.0% of the groups (120 of 120 in the latest 3 steps)" in alarm.wrong


def test_a_run_that_resumes_is_not_told_again() -> None:
    for groups in ([UNIFORM] * 40, [SOLVED] * 40, [[0.0, 0.0]] * 40, [UNIFORM] * 39 + [MIXED]):
        assert watch(*[step(groups)] * 10) != []
        assert watch(*[step(groups)] * 10, resumed=True) == []


def test_a_run_that_collapses_after_it_resumed_is_told() -> None:
    good, collapsed = step([SOLVED] * 36 + [MIXED] * 4), step([[0.0, 0.0]] * 40)
    assert [number for number, _ in watch(*[good] * 4, *[collapsed] * 4, resumed=True)] == [7]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
@pytest.mark.parametrize(("num_groups", "size"), [(128, 8), (16, 8), (4, 4), (32, 2)])
@pytest.mark.parametrize(("begin", "end"), [(0.25, 0.9), (0.25, 0.99), (0.05, 0.6), (0.8, 0.999)])
def test_a_run_that_learns_is_never_warned_of(
    seed: int, num_groups: int, size: int, begin: float, end: float
) -> None:
    """Each problem has its own chance to be solved, around an accuracy that rises over 80 steps."""
    draw, steps = random.Random(seed), []
    for number in range(80):
        accuracy = begin + (end - begin) * min(number / 60, 1)
        chances = [draw.betavariate(2 * accuracy, 2 * (1 - accuracy)) for _ in range(num_groups)]
        steps.append(step([[float(draw.random() < chance) for _ in range(size)] for chance in chances]))
    assert watch(*steps) == []
    assert watch(*steps[40:], resumed=True) == []
