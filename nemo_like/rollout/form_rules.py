"""Rules on what responses of a wrong form lose: their reward, or the advantages of their tokens."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from nemo_like.algorithms.loss_traits import learns_from_teacher_alone
from nemo_like.algorithms.message_flags import MessageFlag
from nemo_like.config.problems import Problem
from nemo_like.environments.registry import has_tools
from nemo_like.rollout.tasks import RolloutConfigGroups, used_environments

_OF_CALLS = MessageFlag.invalid_tool_call.name
_OF_THOUGHTS = (MessageFlag.malformed_thinking.name, MessageFlag.repeated_thinking.name)


def form_problems(cfg: RolloutConfigGroups) -> Iterator[Problem]:
    """Yield every problem with what the run looks for in the texts of responses."""
    names = MessageFlag.__members__
    asked: dict[str, str] = {}  # by flag, the key that asks for it
    for name in cfg.rollout.no_reward_for:
        asked[name] = f"rollout.no_reward_for={cfg.rollout.no_reward_for}"
        if name not in names:
            close = get_close_matches(name, names, n=1)
            yield Problem(
                key=asked[name],
                rule=f"has {name!r}, and must have some of {', '.join(names)}",
                remedy=f"did you mean {close[0]}?" if close else "",
            )
    for name in ("invalid_tool_call", "malformed_thinking"):
        if (penalty := getattr(cfg.loss_fn, f"{name}_advantage")) is None:
            continue
        asked[name] = key = f"loss_fn.{name}_advantage={penalty:g}"
        if learns_from_teacher_alone(cfg.loss_fn):
            rule = f"has no effect with loss_fn.kind={cfg.loss_fn.kind}, which learns from a teacher alone"
            yield Problem(key=key, rule=rule, remedy="set it to null")
    if _OF_CALLS in asked and not any(has_tools(env) for env in used_environments(cfg).values()):
        yield Problem(
            key=asked[_OF_CALLS],
            rule="is of tool calls, and no environment of this run has tools or an agent",
            remedy="leave it out, or choose an environment such as mcp or agent",
        )
    marks = cfg.rollout.thinking_marks
    of_thoughts = [asked[name] for name in _OF_THOUGHTS if name in asked]
    if of_thoughts and (len(marks) != 2 or not all(marks) or marks[0] == marks[1]):
        yield Problem(
            key=f"rollout.thinking_marks={marks}",
            rule=f"must be two texts for {of_thoughts[0]}: how a thought begins, and how it ends",
            remedy="for example ['<think>', '</think>']",
        )
    if _OF_CALLS in asked and not all(cfg.rollout.tool_call_marks or [""]):
        rule = f"must be some texts for {asked[_OF_CALLS]}, none of them empty"
        yield Problem(key=f"rollout.tool_call_marks={cfg.rollout.tool_call_marks}", rule=rule, remedy="")
