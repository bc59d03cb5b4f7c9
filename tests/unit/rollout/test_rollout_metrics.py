from __future__ import annotations

import pytest

from nemo_like.data.interface import Encoded
from nemo_like.environments.interface import FailureKind, Feedback
from nemo_like.observability.metrics import merge
from nemo_like.rollout.conversation import Conversation
from nemo_like.rollout.rollout_metrics import rollout_metrics
from tests.unit.rollout.conversations import conversation, finished, response


def _groups() -> list[list[Conversation]]:
    """Sums: one right and one cut off. A game: two turns that ran out of turns, and one that failed."""
    right, cut = conversation((4, 5)), conversation((4, 5))
    right.add_response(response([7, 1]), "7", 3)
    right.add_feedback(Feedback({"right": 1.0, "style": 0.5}, metrics={"length": 1.0}))
    cut.add_response(response([7, 7, 7, 7], is_truncated=True), "7777", 3)
    cut.add_feedback(Feedback({"right": 0.0, "style": 0.0}, metrics={"length": 4.0}))
    lost, failed = conversation((4,), max_turns=2, env="game"), conversation((4,), max_turns=2, env="game")
    lost.add_response(response([8]), "u", 3)
    lost.add_feedback(Feedback(observation="k", is_done=False))
    lost.add_observation("k", Encoded((20,)))
    lost.add_response(response([8]), "u", 3)
    lost.add_feedback(Feedback({"solved": 0.0}, observation="k", is_done=False))
    failed.add_response(response([9]), "d", 3)
    failed.add_feedback(Feedback.failed(FailureKind.timed_out, "too slow"))
    return [[right, cut], [lost, failed]]


def test_lengths_ends_and_turns_are_over_all_samples() -> None:
    values = {name: metric.value for name, metric in rollout_metrics(_groups()).items()}
    assert values["mean_prompt_length"] == 1.5
    assert values["mean_gen_tokens_per_sample"] == 2.25  # 2 + 4 + 2 + 1
    assert values["max_gen_tokens_per_sample"] == 4
    assert values["total_num_tokens"] == 16  # 6 of prompts, 9 generated, 1 observed
    assert values["avg_turns_per_sample"] == 1.25
    assert values["truncation_rate"] == 0.25
    assert values["turn_limit_rate"] == 0.25
    assert values["natural_termination_rate"] == 0.25  # the one that is right: one failed
    assert values["num_failed_rewards"] == 1
    assert values["failed_reward_share"] == 0.25


def test_rewards_and_failures_are_told_apart_by_environment() -> None:
    values = {name: metric.value for name, metric in rollout_metrics(_groups()).items()}
    of_sums = {name: value for name, value in values.items() if name.startswith("env/sums/")}
    assert of_sums == {
        "env/sums/reward": 0.75,
        "env/sums/reward_std": pytest.approx(1.5 / 2**0.5),
        "env/sums/reward_std/right": pytest.approx(1.0 / 2**0.5),
        "env/sums/reward_std/style": pytest.approx(0.5 / 2**0.5),
        "env/sums/baseline_reward/pct_uniform": 0,
        "env/sums/baseline_reward/pct_uniform/right": 0,
        "env/sums/baseline_reward/pct_uniform/style": 0,
        "env/sums/reward/right": 0.5,
        "env/sums/reward/style": 0.25,
        "env/sums/length": 2.5,
        "env/sums/num_samples": 2,
        "env/sums/num_failed_rewards": 0,
        "env/sums/failed_reward_share": 0,
    }
    assert values["env/game/reward"] == 0.0
    assert values["env/game/num_failed_rewards/timed_out"] == 1
    assert values["env/game/failed_reward_share"] == 0.5
    # One judged sample has nothing to differ from.
    assert values["env/game/baseline_reward/pct_uniform/solved"] == 100
    assert "env/game/reward_std" not in values


def test_a_component_that_is_flat_shows_beside_one_that_is_not() -> None:
    groups = [
        [finished((4, 5), response([7]), Feedback({"format": own, "right": 0.0})) for own in of_group]
        for of_group in ([0.1, 0.1], [0.1, 0.5, 0.9], [0.2, 0.2])
    ]
    groups[2].append(finished((4, 5), response([7]), Feedback.failed(FailureKind.raised, "it raised")))
    values = {name: metric.value for name, metric in rollout_metrics(groups).items()}
    # The standard deviations are 0, 0.4 and 0; of seven judged samples four are in groups without any.
    assert values["env/sums/reward_std"] == pytest.approx(0.4 / 3)
    assert values["env/sums/reward_std/format"] == pytest.approx(0.4 / 3)
    assert values["env/sums/baseline_reward/pct_uniform"] == pytest.approx(100 * 4 / 7)
    assert values["env/sums/reward/right"] == 0
    assert values["env/sums/reward_std/right"] == 0
    assert values["env/sums/baseline_reward/pct_uniform/right"] == 100


def test_what_only_a_last_turn_reports_is_averaged_over_those_that_report_it() -> None:
    sample, silent = conversation((4,), max_turns=3), conversation((4,))
    for _ in range(2):
        sample.add_response(response([8]), "u", 3)
        sample.add_feedback(Feedback(observation="k", is_done=False, metrics={"moves": 1.0}))
        sample.add_observation("k", Encoded((20,)))
    sample.add_response(response([8]), "u", 3)
    sample.add_feedback(Feedback({"a": 1.0}, metrics={"moves": 4.0, "solved": 1.0}))
    silent.add_response(response([8]), "u", 3)
    silent.add_feedback(Feedback({"a": 1.0}))
    values = {name: metric.value for name, metric in rollout_metrics([[sample], [silent]]).items()}
    assert values["env/sums/solved"] == 1.0
    assert values["env/sums/moves"] == 2.0


def test_a_component_that_abstains_counts_in_neither_its_own_mean_nor_the_rewards() -> None:
    samples = []
    for rewards in ({"right": 1.0, "style": None}, {"right": 0.0, "style": 0.5}, {"right": 1.0}):
        sample = conversation((4,))
        sample.add_response(response([8]), "u", 3)
        sample.add_feedback(Feedback(rewards))
        samples.append(sample)
    assert [sample.reward for sample in samples] == [1.0, 0.5, 1.0]
    values = {name: metric.value for name, metric in rollout_metrics([samples]).items()}
    assert values["env/sums/reward"] == pytest.approx(2.5 / 3)
    assert values["env/sums/reward/right"] == pytest.approx(2 / 3)
    # Over the two that do not abstain; one of them has no such component, which is 0.
    assert values["env/sums/reward/style"] == 0.25
    assert values["env/sums/abstained_share/style"] == pytest.approx(1 / 3)
    assert "env/sums/abstained_share/right" not in values


def test_a_component_that_abstains_in_one_turn_counts_what_another_gave() -> None:
    sample = conversation((4,), max_turns=2)
    sample.add_response(response([8]), "u", 3)
    sample.add_feedback(Feedback({"a": 1.0, "b": None}, observation="k", is_done=False))
    sample.add_observation("k", Encoded((20,)))
    sample.add_response(response([8]), "u", 3)
    sample.add_feedback(Feedback({"a": None, "b": None, "c": 2.0}))
    assert sample.rewards == {"a": 1.0, "b": None, "c": 2.0}
    assert sample.reward == 3.0


def test_an_environment_that_judged_nothing_has_no_mean_reward() -> None:
    failed = conversation((4,))
    failed.add_response(response([9]), "d", 3)
    failed.add_feedback(Feedback.failed(FailureKind.raised, "it raised"))
    assert "env/sums/reward" not in rollout_metrics([[failed]])


def test_two_rollouts_merge_to_the_means_over_both() -> None:
    first, second = _groups()
    merged = merge([rollout_metrics([first]), rollout_metrics([second])])
    together = rollout_metrics([first, second])
    assert {name: metric.value for name, metric in merged.items()} == {
        name: metric.value for name, metric in together.items()
    }
