from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.batch.columns import Column, Layout
from nemo_like.configuration import Config
from nemo_like.preflight.targets import Target, TargetKind, inspected, problem_of, targets_of

MODULE = """
from nemo_like.batch.columns import Column, Layout, reads, writes
from nemo_like.batch.tags import NUM_TURNS, reads_tags

def brevity(turn, limit=100): ...


def no_turn(): ...


def by_name(prompt, response): ...


class Game:
    def __init__(self, size): ...

    async def step(self, turns): ...


class NoGame: ...


number = 3

A = Column("a", "float32", Layout.per_token)


@writes(A)
def bringing(turn): ...


@reads(A)
def weighing(tokens, cfg): ...


def estimate(inputs, cfg): ...


@writes(A)
def storing(inputs, cfg): ...


@reads_tags(NUM_TURNS)
def short(samples, cfg): ...


def warm(tokens, cfg, tau: float = 1.0, is_soft: bool = False): ...


@reads_tags(NUM_TURNS)
def tagged_loss(tokens, cfg): ...


@reads_tags("num_turns")
def wrong_tag(samples, cfg): ...


@writes("a")
def wrong(turn): ...
"""


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_targets.py").write_text(MODULE)
    (tmp_path / "raising_target.py").write_text("raise OSError('no such device')")
    monkeypatch.syspath_prepend(str(tmp_path))


def target(path: str, kind: TargetKind, **arguments: object) -> Target:
    return Target("key", path, kind, arguments, "part")


@pytest.mark.parametrize(
    "accepted",
    [
        target("own_targets:brevity", TargetKind.reward_function),
        target("own_targets:brevity", TargetKind.reward_function, limit=3),
        target("own_targets:Game", TargetKind.environment, size=3),
        target("own_targets:estimate", TargetKind.advantage_estimator),
        target("own_targets:short", TargetKind.sample_filter),
        target("own_targets:warm", TargetKind.loss, tau=2, is_soft=True),
    ],
)
def test_what_can_be_called_as_it_will_be_has_no_problem(accepted: Target) -> None:
    assert problem_of(accepted) is None


@pytest.mark.parametrize(
    ("refused", "problem"),
    [
        (target("own_targets:Gam", TargetKind.environment), "cannot be imported: .* has no 'Gam'"),
        (target("no_such:f", TargetKind.reward_function), "cannot be imported: .*no module 'no_such'"),
        (target("raising_target:f", TargetKind.reward_function), "cannot be imported: OSError: no such"),
        (target("own_targets:number", TargetKind.reward_function), "is int and cannot be called"),
        (target("own_targets:NoGame", TargetKind.environment), r"without the method step\(turns\)"),
        (target("own_targets:Game", TargetKind.environment, size=3, x=1), "unexpected keyword argument 'x'"),
        (target("own_targets:Game", TargetKind.environment), "missing a required argument: 'size'"),
        (
            target("own_targets:warm", TargetKind.loss, taw=1.0),
            r"keyword argument 'taw'; .*did you mean tau\?",
        ),
        (target("own_targets:warm", TargetKind.loss, tau="1"), "takes tau as float, and would be given '1'"),
        (
            target("own_targets:warm", TargetKind.loss, tau=True),
            "takes tau as float, and would be given True",
        ),
        (target("own_targets:warm", TargetKind.loss, is_soft=1), "takes is_soft as bool, and .* given 1"),
        (target("own_targets:no_turn", TargetKind.reward_function), "too many positional arguments"),
        (
            target("own_targets:by_name", TargetKind.reward_function),
            r"given, \(turn\): missing .* 'response'; .*; turn.prompt, turn.response, turn.answer",
        ),
        (target("own_targets:Game", TargetKind.environment, x=1), r"given, \(x=1\): missing"),
    ],
)
def test_what_cannot_is_told_with_the_reason(refused: Target, problem: str) -> None:
    assert re.search(problem, problem_of(refused) or "")


def test_targets_are_those_of_the_environments_in_use_and_of_the_advantages(
    demo: Callable[..., Config],
) -> None:
    cfg = demo(
        "env.arithmetic.kind=function",
        "++env.arithmetic.options={function: 'own_targets:brevity', arguments: {limit: 3}}",
        "grpo.adv_estimator.name='own_targets:estimate'",
    )
    assert list(targets_of(cfg)) == [
        Target(
            "env.arithmetic.options.function",
            "own_targets:brevity",
            TargetKind.reward_function,
            {"limit": 3},
            "env.arithmetic",
        ),
        Target(
            "grpo.adv_estimator.name",
            "own_targets:estimate",
            TargetKind.advantage_estimator,
            {},
            "grpo.adv_estimator",
        ),
    ]
    assert list(targets_of(demo("grpo.sample_filters=[not_truncated]"))) == []


def test_losses_filters_and_what_has_arguments_are_targets_too(demo: Callable[..., Config]) -> None:
    cfg = demo(
        "loss_fn.kind=own_targets:warm",
        "++loss_fn.arguments.tau=2.0",
        "grpo.sample_filters=[not_truncated,'own_targets:short']",
    )
    path, arguments = "own_targets:warm", {"tau": 2.0}
    assert list(targets_of(cfg)) == [
        Target("grpo.sample_filters[1]", "own_targets:short", TargetKind.sample_filter, {}, "grpo"),
        Target("loss_fn.kind", path, TargetKind.loss, arguments, "loss_fn"),
    ]
    wrong = target(path, TargetKind.loss, taus=1.0)
    assert "did you mean tau?" in (problem_of(wrong) or "")


def test_a_shipped_loss_is_a_target_where_a_teacher_scores_for_it(demo: Callable[..., Config]) -> None:
    assert list(targets_of(demo("loss_fn.kind=sapo", "loss_fn.tau_pos=2.0"))) == []
    teacher = ("teacher=default", "teacher.model_name=${policy.model_name}")
    (found,) = targets_of(demo(*teacher, "loss_fn.kind=distillation", "loss_fn.weight=2"))
    assert (found.key, found.path) == ("loss_fn.kind", "nemo_like.policy.loss.distillation_loss:distillation")
    assert found.arguments["weight"] == 2
    assert problem_of(found) is None


def test_what_code_says_of_columns_is_seen_without_calling_it() -> None:
    bringing = inspected(target("own_targets:bringing", TargetKind.reward_function))
    weighing = inspected(target("own_targets:weighing", TargetKind.loss))
    assert (bringing.problem, weighing.problem) == (None, None)
    assert bringing.columns is not None
    assert weighing.columns is not None
    assert bringing.columns.writes == weighing.columns.reads == (Column("a", "float32", Layout.per_token),)


@pytest.mark.parametrize(
    ("refused", "problem"),
    [
        (target("own_targets:weighing", TargetKind.loss), ""),
        (target("own_targets:bringing", TargetKind.loss), "does not take what it would be given"),
        (
            target("own_targets:storing", TargetKind.advantage_estimator),
            "is marked with @writes, and only an",
        ),
        (target("own_targets:tagged_loss", TargetKind.loss), "is marked with @reads_tags, and only an"),
        (target("own_targets:wrong_tag", TargetKind.sample_filter), "no tuple of Tag"),
        (target("own_targets:wrong", TargetKind.reward_function), "no tuple of Column"),
        (target("own_targets:Gam", TargetKind.environment), "has no 'Gam'"),
    ],
)
def test_a_mark_that_nobody_would_read_is_refused(refused: Target, problem: str) -> None:
    assert problem in (inspected(refused).problem or "")
