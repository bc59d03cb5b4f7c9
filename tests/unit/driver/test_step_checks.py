"""A step as the driver has it: healthy, it trips nothing; changed in one place, it names that place."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from nemo_like.batch.columns import ROLLOUT_COLUMNS
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.configuration import load_config
from nemo_like.driver.collection import Collected
from nemo_like.driver.ready_groups import ReadyGroups
from nemo_like.driver.reports import CriticStep, StepResults
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.step_checks import RunFacts, Sent, StepTripwires
from nemo_like.observability.metrics import maximum, mean, summed
from nemo_like.policy.groups.results import ScoredBatch, TrainUpdate
from nemo_like.rollout.prompts import PromptBatch, RolloutMode
from nemo_like.tripwires.alarm import Alarm
from nemo_like.tripwires.measured import Measured

CONFIG = Path(__file__).resolve().parents[3] / "configs/grpo_arithmetic_cpu.yaml"
SMALL = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "policy.train_global_batch_size=2",
)
PROMPTS = PromptBatch(RolloutMode.training, 1, 0, (5, 9), 2)
TAGS = {
    "group_id": (0, 0, 1, 1),
    "reward": (1.0, 0.0, 1.0, 1.0),
    "shaped_reward": (1.0, 0.0, 1.0, 1.0),
    "is_judged": (True, True, True, True),
    "sample_mask": (1.0, 1.0, 1.0, 1.0),
    "num_response_tokens": (3, 4, 2, 2),
    "is_truncated": (False, False, False, False),
    "outcome": ("trained",) * 4,
    "advantage": (2**-0.5, -(2**-0.5), 0.0, 0.0),
}
BATCH = KVBatchMeta(
    "train-1",
    (Chunk("a", (6, 7)), Chunk("b", (5, 5))),
    ((0, 0), (0, 1), (1, 0), (1, 1)),
    frozenset(column.name for column in ROLLOUT_COLUMNS),
    TAGS,
)
# The second step's two updates are numbers 3 and 4 of a warm-up of 40 to 1e-3.
UPDATE = {
    Measured.num_wrong_samples: 0.0,
    Measured.loss_gradient_error: 1e-6,
    Measured.loss_error: 1e-7,
    Measured.num_updates: 4.0,
    Measured.optimizer_step_gap: 0.0,
    Measured.learning_rate: 1e-4,
    Measured.moment_excess: 0.0,
    Measured.weights_moved: 1e-4,
    Measured.largest_weight: 0.5,
}
METRICS = {"lr": 1e-4, "grad_norm": 0.7, "loss": 0.0, "token_mult_prob_error": 1.0000005}


@dataclass(frozen=True)
class Step:
    """What a step's stages returned, in part."""

    tags: dict[str, tuple[Any, ...]]
    update: dict[Measured, float]
    metrics: dict[str, float]
    counts: list[list[tuple[int, int]]]
    digest: float = 99.0
    num_failed: int = 0
    gap: float | None = 1e-6
    critic: dict[str, float] | None = None

    def results(self) -> StepResults:
        batch = BATCH.with_tags(self.tags)
        digest = maximum(99.0)
        measured = {Measured.engine_digest_min: digest, Measured.engine_digest_max: digest}
        rollout = Collected(
            batch=batch,
            dropped=(),
            metrics={"num_failed_rewards": summed(self.num_failed)},
            num_rollouts=1,
            generation_s=1.0,
            reward_s=0.0,
            put_s=0.0,
            operations=(),
            measured=measured,
        )
        num_tokens = self.update.get(Measured.num_trained_tokens, 11.0)
        update = TrainUpdate(
            metrics={name: mean(value) for name, value in self.metrics.items()},
            version=2,
            compute_s=0.0,
            operations=(),
            measured={
                **{name: maximum(value) for name, value in self.update.items()},
                Measured.num_trained_tokens: summed(num_tokens),
            },
            planned_counts=self.counts,
        )
        scored = ScoredBatch(batch)
        critic = None
        if self.critic is not None:
            of_critic = {name: mean(value) for name, value in self.critic.items()}
            critic = CriticStep(scored, replace(update, metrics=of_critic, measured={}))
        return StepResults(batch, rollout, ReadyGroups(batch, scored, scored, scored), update, {}, (), critic)


HEALTHY = Step({}, UPDATE, METRICS, [[(7, 2), (4, 2)]] * 2)


def tripwires(*overrides: str, warnings: list[str] | None = None) -> StepTripwires:
    cfg = load_config(CONFIG, (*SMALL, *overrides))
    told = warnings.append if warnings is not None else pytest.fail
    return StepTripwires(cfg, RunFacts(has_experts=False, num_prompts=100), told)


def names(step: Step, *overrides: str) -> list[str]:
    alarms = tripwires(*overrides).check(PROMPTS, step.results(), Sent(step.digest, step.gap))
    return [alarm.tripwire for alarm in alarms]


def test_a_healthy_step_trips_nothing() -> None:
    assert names(HEALTHY) == []


CHANGES: dict[str, tuple[Callable[[Step], Step], list[str]]] = {
    "weights_digest": (lambda step: replace(step, digest=98.0), ["weights_digest"]),
    "canary": (lambda step: replace(step, gap=0.01), ["canary"]),
    "masks": (lambda step: replace(step, num_failed=1), ["masks"]),
    "groups": (lambda step: replace(step, tags={"group_id": (0, 1, 0, 1)}), ["groups"]),
    "advantages": (lambda step: replace(step, tags={"advantage": (0.5, -0.5, 0.0, 0.0)}), ["advantages"]),
    "denominators": (lambda step: replace(step, counts=[[(11, 2), (4, 2)]]), ["denominators"]),
    "token_count": (
        lambda step: replace(step, update={**UPDATE, Measured.num_trained_tokens: 12.0}),
        ["token_count"],
    ),
    "samples": (lambda step: replace(step, update={**UPDATE, Measured.num_wrong_samples: 1.0}), ["samples"]),
    "loss": (lambda step: replace(step, update={**UPDATE, Measured.loss_gradient_error: 0.5}), ["loss"]),
    "rate": (lambda step: replace(step, update={**UPDATE, Measured.learning_rate: 2e-4}), ["learning_rate"]),
    "kept": (
        lambda step: replace(step, update={**UPDATE, Measured.weights_moved_elsewhere: 1.0}),
        ["weights_kept"],
    ),
    "change": (
        lambda step: replace(step, update={**UPDATE, Measured.weights_moved: 0.0}),
        ["weights_change"],
    ),
    "finite": (lambda step: replace(step, metrics={**METRICS, "loss": float("nan")}), ["finite"]),
    "clipping": (
        lambda step: replace(
            step, metrics={**METRICS, "probs_ratio_max": 2.0, "probs_ratio_clamped_max": 1.1}
        ),
        ["clipping"],
    ),
    "agreement": (
        lambda step: replace(step, metrics={**METRICS, "token_mult_prob_error": 1.01}),
        ["agreement"],
    ),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_a_change_in_one_place_names_that_place(change: Callable[[Step], Step], expected: list[str]) -> None:
    assert names(change(HEALTHY)) == expected
    assert names(change(HEALTHY), "debug.tripwires=off") == []


def test_weights_may_move_by_the_rates_of_all_updates_of_a_step_though_the_last_one_is_0() -> None:
    schedule = [
        f"policy.scheduler.{key}"
        for key in ("warmup_updates=2", "decay_style=linear", "decay_updates=4", "min_lr=0")
    ]
    # Updates 3 and 4 have rates of 5e-4 and 0.
    moved = {**UPDATE, Measured.learning_rate: 0.0, Measured.weights_moved: 4e-4}
    step = replace(HEALTHY, metrics={**METRICS, "lr": 0.0}, update=moved)
    assert names(step, *schedule) == []
    assert names(replace(step, update={**moved, Measured.weights_moved: 2e-3}), *schedule) == [
        "weights_change"
    ]


def test_truncated_samples_may_train_unless_they_are_filtered() -> None:
    step = replace(HEALTHY, tags={"is_truncated": (True, False, False, False)})
    assert names(step) == []
    assert names(step, "grpo.overlong_filtering=true") == ["masks"]


@pytest.mark.parametrize("outcome", ["overlong", "logprob_mismatch"])
def test_a_masked_sample_counts_in_nobodys_advantages(outcome: str) -> None:
    step = replace(
        HEALTHY, counts=[[(3, 1), (4, 2)]] * 2, update={**UPDATE, Measured.num_trained_tokens: 7.0}
    )
    tags = {
        "sample_mask": (1.0, 0.0, 1.0, 1.0),
        "outcome": ("trained", outcome, "trained", "trained"),
    }
    assert names(replace(step, tags=tags)) == ["advantages"]


@pytest.mark.parametrize("outcome", ["overlong", "logprob_mismatch"])
@pytest.mark.parametrize("option", ["grpo.use_dynamic_sampling=false", "grpo.use_dynamic_sampling=true"])
def test_a_sample_that_a_step_masks_has_a_reward_and_was_collected_with_it(outcome: str, option: str) -> None:
    step = replace(
        HEALTHY, counts=[[(3, 1), (4, 2)]] * 2, update={**UPDATE, Measured.num_trained_tokens: 7.0}
    )
    tags = {
        "reward": (1.0, 0.0, 1.0, 0.0),
        "sample_mask": (1.0, 0.0, 1.0, 1.0),
        "outcome": ("trained", outcome, "trained", "trained"),
        # Of the first group one sample is left, which has nothing to be compared with.
        "shaped_reward": (1.0, 0.0, 1.0, 0.0),
        "advantage": (0.0, 0.0, 2**-0.5, -(2**-0.5)),
    }
    assert names(replace(step, tags=tags), option) == []
    unknown = replace(step, tags={**tags, "outcome": ("trained",) * 4})
    assert "masks" in names(unknown, option)


def test_a_critic_whose_gradient_is_no_number_ends_the_run_before_it_is_saved() -> None:
    assert names(replace(HEALTHY, critic={"grad_norm": 0.5})) == []
    critic = {"grad_norm": math.nan}
    assert names(replace(HEALTHY, critic=critic)) == ["finite"]
    assert names(replace(HEALTHY, critic=critic, metrics={})) == ["finite"]  # the critic trains alone


def test_updates_that_float16_skips_are_no_alarm_but_many_in_a_row_are() -> None:
    """Of the step's updates none was made."""
    skipped = {"loss": 0.0, "loss_scale": 512.0, "skipped_updates": 2.0, "skipped_in_a_row": 2.0}
    update = {**UPDATE, Measured.num_updates: 0.0, Measured.weights_moved: 0.0}
    step = replace(HEALTHY, update=update, metrics={"token_mult_prob_error": 1.0, **skipped})
    assert names(step) == []
    many = {**skipped, "skipped_in_a_row": 21.0}
    assert names(replace(step, metrics=many)) == ["loss_scale"]
    assert names(replace(HEALTHY, critic=many), "value=default") == ["loss_scale"]


def test_a_group_with_one_reward_trains_unless_dynamic_sampling_chooses() -> None:
    assert names(HEALTHY, "grpo.use_dynamic_sampling=true") == ["dynamic_sampling"]


def test_a_step_is_compared_with_the_one_before() -> None:
    both = tripwires()
    assert both.check(PROMPTS, HEALTHY.results(), Sent(99.0)) == ()
    alarms = both.check(PROMPTS, HEALTHY.results(), Sent(99.0))
    assert [alarm.tripwire for alarm in alarms] == ["update_count", "repeated_prompts"]
    assert "0 updates were made, not 2" in alarms[0].wrong


def test_a_reward_that_never_varied_is_warned_of_at_the_third_step() -> None:
    same = {"reward": (1.0,) * 4, "shaped_reward": (1.0,) * 4, "advantage": (0.0,) * 4}
    uniform = replace(HEALTHY, tags=same).results()
    never, later = tripwires(), tripwires()
    later.check(PROMPTS, HEALTHY.results(), Sent(99.0))
    for expected in (False, False, True, False):
        found = [
            [one.tripwire for one in each.check(PROMPTS, uniform, Sent(99.0))] for each in (never, later)
        ]
        assert ["constant_reward" in names for names in found] == [expected, False]


def test_a_sample_that_was_not_judged_must_not_train() -> None:
    step = replace(HEALTHY, num_failed=1, tags={"is_judged": (True, True, True, False)})
    (alarm,) = tripwires().check(PROMPTS, step.results(), Sent(99.0))
    assert (alarm.tripwire, alarm.wrong) == ("masks", "1 samples train that were not judged")


def test_rewards_are_looked_at_before_samples_are_masked() -> None:
    """Every response is truncated and filtered: what was judged is 1 for all, then 0 for one."""
    cut = {
        "is_truncated": (True,) * 4,
        "sample_mask": (0.0,) * 4,
        "outcome": ("overlong",) * 4,
        "advantage": (0.0,) * 4,
        "reward": (1.0,) * 4,
    }
    step = replace(
        HEALTHY, tags=cut, counts=[[(0, 0), (0, 0)]] * 2, update={**UPDATE, Measured.num_trained_tokens: 0.0}
    )
    same, varied = (tripwires("grpo.overlong_filtering=true") for _ in range(2))
    varying = replace(step, tags={**cut, "reward": (1.0, 1.0, 0.0, 1.0)})
    told = []
    for _ in range(3):
        told += [one for one in same.check(PROMPTS, step.results(), Sent(99.0)) if "rewards" in one.wrong]
        found = varied.check(PROMPTS, varying.results(), Sent(99.0))
        assert "constant_reward" not in [one.tripwire for one in found]
    assert [one.wrong for one in told] == [
        "in each of the first 3 steps all rewards were equal, at last 1; 100% of the responses are "
        "truncated: raise generation.max_new_tokens"
    ]


def with_metrics(step: Step, **metrics: float) -> StepResults:
    results = step.results()
    return replace(
        results,
        rollout=replace(
            results.rollout,
            metrics={**results.rollout.metrics, **{name: mean(value) for name, value in metrics.items()}},
        ),
    )


def test_a_component_that_differs_in_no_group_is_named() -> None:
    same = {"reward": (1.0,) * 4, "shaped_reward": (1.0,) * 4, "advantage": (0.0,) * 4}
    results = with_metrics(
        replace(HEALTHY, tags=same),
        **{
            "env/math/reward/right": 0.0,
            "env/math/reward/style": 1.0,
            "env/math/baseline_reward/pct_uniform/right": 100.0,
            "env/math/baseline_reward/pct_uniform/style": 94.0,
            # The only component of an environment is its reward.
            "env/code/reward/passed": 1.0,
            "env/code/baseline_reward/pct_uniform/passed": 100.0,
        },
    )
    watching = tripwires()
    [_, _, alarms] = [watching.check(PROMPTS, results, Sent(99.0)) for _ in range(3)]
    (told,) = (one.wrong for one in alarms if one.tripwire == "constant_reward")
    assert "differ within nearly no group: right of env.math (mean 0): see" in told
    assert "style" not in told
    assert "passed" not in told


def test_rewards_say_nothing_where_a_teacher_is_learned_from_and_little_after_a_resume() -> None:
    same = {"reward": (1.0,) * 4, "shaped_reward": (1.0,) * 4, "advantage": (0.0,) * 4}
    uniform = replace(HEALTHY, tags=same).results()
    resumed = tripwires()
    resumed.check_resume(3, {}, {})
    taught = tripwires("teacher=default", "teacher.model_name=x", "loss_fn.kind=distillation")
    for each in (resumed, taught):
        found = [one.tripwire for _ in range(4) for one in each.check(PROMPTS, uniform, Sent(99.0))]
        assert "constant_reward" not in found


def alarm(name: str, *, ends_run: bool = True) -> Alarm:
    return Alarm(tripwire=name, wrong=f"{name} is wrong", look_at="there", ends_run=ends_run)


def test_all_alarms_of_a_step_are_told_at_once_when_one_ends_the_run() -> None:
    with pytest.raises(RunFailed) as raised:
        tripwires().warn_or_end(7, [alarm("weak", ends_run=False), alarm("strong")])
    message = str(raised.value)
    assert message.startswith("at step 7, tripwire 'weak': weak is wrong; look at there\n")
    assert "tripwire 'strong'" in message
    assert "debug.tripwires=off" in message


def test_a_tripwire_warns_once() -> None:
    warnings: list[str] = []
    both = tripwires(warnings=warnings)
    for step in (1, 2):
        both.warn_or_end(step, [alarm("weak", ends_run=False)])
    both.warn_or_end(3, [alarm("weak", ends_run=False), alarm("other", ends_run=False)])
    both.warn_or_end(4, [])
    assert [text.partition(",")[0] for text in warnings] == ["at step 1", "at step 3"]
    assert "'weak'" not in warnings[1]


def test_the_module_is_looked_for_where_engines_and_trainer_differ_and_told_with_the_alarm() -> None:
    searched: list[str] = []

    def mismatch() -> str:
        searched.append("once more")
        return "engine 0: layers.3.self_attn.o_proj: weights are equal, o_proj differs"

    cfg, warnings = load_config(CONFIG, SMALL), list[str]()
    own = StepTripwires(cfg, RunFacts(has_experts=False, num_prompts=100), warnings.append, mismatch)
    own.warn_or_end(1, [alarm("weak", ends_run=False)])
    assert not searched
    own.warn_or_end(2, [alarm("canary", ends_run=False)])
    own.warn_or_end(3, [alarm("canary", ends_run=False)])
    assert len(searched) == 1
    assert warnings[1].splitlines()[1] == (
        "where engines and trainer differ: engine 0: layers.3.self_attn.o_proj: weights are equal, o_proj "
        "differs; scripts/find_mismatch.py compares a sample of the run"
    )
    with pytest.raises(RunFailed, match="where engines and trainer differ: engine 0"):
        own.warn_or_end(4, [alarm("agreement")])


def test_a_run_continues_with_the_prompts_of_its_checkpoint() -> None:
    tripwires().check_resume(4, {"offset": 8}, {"offset": 8})
    tripwires("debug.tripwires=off").check_resume(4, {"offset": 0}, {"offset": 8})
    with pytest.raises(RunFailed, match=r"^resumed at step 4, tripwire 'resumed_prompts'"):
        tripwires().check_resume(4, {"offset": 0}, {"offset": 8})
