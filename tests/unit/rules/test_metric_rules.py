from __future__ import annotations

from collections.abc import Callable

import pytest

from nemo_like.configuration import Config
from nemo_like.observability.metric_meanings import meaning_of
from nemo_like.plan.reported_metrics import training_metrics, validation_metrics
from nemo_like.rules.metric_rules import metric_problems

Demo = Callable[..., Config]
SEVERAL = ("data.validation=[{name: easy}, {name: hard}]", "grpo.num_val_generations_per_prompt=6")


def problems(cfg: Config) -> list[str]:
    return [str(problem) for problem in metric_problems(cfg)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("checkpointing.metric_name=validation/accuracy",),
        ("checkpointing.metric_name=null",),
        ("checkpointing.metric_name=train/reward",),
        ("checkpointing.metric_name=train/env/arithmetic/reward/exact_match",),
        (*SEVERAL, "checkpointing.metric_name=validation/hard/pass@4"),
        (*SEVERAL, "grpo.val_stop_threshold=0.9", "grpo.val_stop_metric=validation/easy/majority@6"),
        ("checkpointing.enabled=false", "checkpointing.metric_name=nothing"),
        ("grpo.val_stop_metric=nothing",),  # without a threshold nothing stops
    ],
)
def test_a_metric_that_the_run_reports_or_nobody_asks_for_is_accepted(
    demo: Demo, arguments: tuple[str, ...]
) -> None:
    assert problems(demo(*arguments)) == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ("checkpointing.metric_name=validation/acuracy",),
            "checkpointing.metric_name=validation/acuracy is no metric of this run "
            "(docs/reference/metrics.md); "
            "did you mean validation/accuracy?",
        ),
        (
            ("checkpointing.metric_name=validation/easy/accuracy",),  # there is one set
            "checkpointing.metric_name=validation/easy/accuracy is no metric",
        ),
        (
            ("checkpointing.metric_name=train/env/math/reward",),
            "checkpointing.metric_name=train/env/math/reward is no metric",
        ),
        (
            ("grpo.val_stop_threshold=0.9", "grpo.val_stop_metric=train/reward"),
            "grpo.val_stop_metric=train/reward is no metric of this run's validation "
            "(docs/reference/metrics.md); "
            "did you mean validation/reward?",
        ),
        (
            ("grpo.val_stop_threshold=0.9", "grpo.val_stop_metric=loss"),
            "grpo.val_stop_metric=loss is no metric of this run's validation (docs/reference/metrics.md); "
            "there are validation/accuracy, ",
        ),
        (
            ("grpo.val_stop_threshold=0.9", "grpo.val_stop_metric=validation/pass@1"),  # one answer each
            "grpo.val_stop_metric=validation/pass@1 is no metric of this run's validation",
        ),
    ],
)
def test_a_metric_that_no_step_would_report_is_refused(
    demo: Demo, arguments: tuple[str, ...], problem: str
) -> None:
    (found,) = problems(demo(*arguments))
    assert found.startswith(problem)


def test_every_name_is_in_the_documentation(demo: Demo) -> None:
    names = [
        *training_metrics(demo("value=default", "policy.precision=float16")),
        *validation_metrics(demo(*SEVERAL)),
    ]
    assert len(names) > 80
    assert [name for name in names if not name.endswith("/") and meaning_of(name) is None] == []


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_critics_metrics_are_those_of_a_run_with_one(demo: Demo, precision: str) -> None:
    """The names are those of its training phase and of the report."""
    import torch

    from nemo_like.algorithms.losses import TokenMean
    from nemo_like.driver.reports import CriticStep, critic_metrics
    from nemo_like.observability.metrics import mean, summed
    from nemo_like.policy.groups.results import ScoredBatch, TrainUpdate
    from nemo_like.policy.loss.train_metrics import TrainMetrics
    from nemo_like.policy.loss.value_objective import VALUE_MEANS
    from tests.unit.driver.test_stages import rollout

    phase = TrainMetrics(torch.device("cpu"), 1, VALUE_MEANS)
    phase.add_update(grad_norm=1.0, learning_rate=1.0)
    if precision == "float16":
        phase.set_loss_scale(1024.0, 0)
    ones = torch.ones(1)
    phase.add_means({name: TokenMean(ones, ones) for name in VALUE_MEANS})
    fit = {"returns": 1.0, "square_returns": 2.0, "errors": 0.0, "square_errors": 0.5}
    valued = ScoredBatch(rollout(), {name: mean(value, 1.0) for name, value in fit.items()})
    trained = {**phase.result(), "num_skipped_samples": summed(0.0)}
    update = TrainUpdate(metrics=trained, version=1, compute_s=0.0, operations=())
    reported = critic_metrics(CriticStep(valued, update))
    assert reported["train/value/explained_variance"] == 0.5  # 1 - (0.5 - 0) / (2 - 1)
    cfg = demo("value=default", f"policy.precision={precision}")
    known = {name for name in training_metrics(cfg) if name.startswith("train/value/")}
    assert set(reported) == known
    assert not any(name.startswith("train/value/") for name in training_metrics(demo()))


def test_a_validation_reports_just_these(demo: Demo) -> None:
    """The names are those of the report itself."""
    from nemo_like.driver.validation import ValidationSet, validation_report
    from tests.unit.driver.test_validation import answered

    cfg = demo(*SEVERAL)
    sets = [ValidationSet("easy", (0,)), ValidationSet("hard", (1,))]
    report = validation_report(answered([1.0] * 12, size=6), sets, cfg.grpo, {})
    assert set(validation_metrics(cfg)) == set(report.metrics)
