"""What responses of a wrong form lose: the keys for it, and what a run must have for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.rollout.form_rules import form_problems
from nemo_like.rules.rules import validate

Demo = Callable[..., Config]


def problems(cfg: Config) -> list[str]:
    return [str(problem) for problem in form_problems(cfg)]


def test_thoughts_need_no_tools(demo: Demo) -> None:
    penalty = "loss_fn.malformed_thinking_advantage=-5"
    assert problems(demo(penalty, "rollout.no_reward_for=[repeated_thinking,empty_answer]")) == []
    validate(demo(penalty))


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("loss_fn.invalid_tool_call_advantage=-5", "loss_fn.invalid_tool_call_advantage=-5"),
        (
            "rollout.no_reward_for=[invalid_tool_call]",
            "rollout.no_reward_for=['invalid_tool_call']",
        ),
    ],
)
def test_a_run_without_tools_has_no_calls_to_punish(demo: Demo, override: str, key: str) -> None:
    assert problems(demo(override)) == [
        f"{key} is of tool calls, and no environment of this run has tools or an agent; leave it out, or "
        "choose an environment such as mcp or agent"
    ]


def test_a_thought_has_two_marks(demo: Demo) -> None:
    (problem,) = problems(demo("loss_fn.malformed_thinking_advantage=-5", "rollout.thinking_marks=[]"))
    assert problem.startswith(
        "rollout.thinking_marks=[] must be two texts for loss_fn.malformed_thinking_advantage=-5"
    )
    assert problems(demo("rollout.thinking_marks=[]")) == []


def test_a_name_that_is_none_is_told_its_neighbour(demo: Demo) -> None:
    (problem,) = problems(demo("rollout.no_reward_for=[malformed_thoughts]"))
    assert "did you mean malformed_thinking?" in problem


def test_a_penalty_is_below_0(demo: Demo) -> None:
    with pytest.raises(ConfigError, match=r"loss_fn\.malformed_thinking_advantage=0\.0 must be below 0"):
        validate(demo("loss_fn.malformed_thinking_advantage=0"))
