"""Checks before the first step that environments can judge and that records fit their columns.

first prompt of a source ──▶ Turn whose response is the reference answer ──▶ environment ──▶ any reward
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

from nemo_like.data.datasets import Sources
from nemo_like.data.interface import TaskPrompt
from nemo_like.data.options import DatasetConfig, source_name
from nemo_like.environments.interface import EnvironmentCheckFailed, first_question
from nemo_like.environments.registry import kind_of
from nemo_like.rollout.rollout_columns import unfit_values
from nemo_like.rollout.tasks import TaskConfigGroups
from nemo_like.rollout.turn_loop import Judge

_MAX_SHOWN_CHARACTERS = 200


async def check_environments(
    cfg: TaskConfigGroups,
    sources: Sequence[tuple[Sequence[DatasetConfig], Sources]],
    judges: Mapping[str, Judge],
    encode: Callable[[str], Sequence[int]],
) -> None:
    """Ask each environment with ``check_at_start`` about the first prompt of its first source.

    ``sources`` has the sections of training and validation, in this order; ``encode`` returns a text's
    tokens. The reward may have any value. Raises EnvironmentCheckFailed, listing every environment that gave
    none.
    """
    first: dict[str, tuple[str, TaskPrompt]] = {}
    for section, read in sources:
        for source, name, task_prompt in _first_task_prompts(section, read):
            if cfg.env[source.env].check_at_start:
                first.setdefault(source.env, (name, task_prompt))
    problems = await asyncio.gather(
        *(
            _problem(cfg, env, judges[env], name, task_prompt, encode)
            for env, (name, task_prompt) in first.items()
        )
    )
    if any(problems):
        raise EnvironmentCheckFailed("\n".join(problem for problem in problems if problem))


def _first_task_prompts(
    section: Sequence[DatasetConfig], read: Sources
) -> Iterator[tuple[DatasetConfig, str, TaskPrompt]]:
    """Yield the first prompt of every source, after the source and its name."""
    start = 0
    for source, report in zip(section, read.reports, strict=True):
        yield source, source_name(source), read.prompts[start]
        start += report.num_prompts


async def _problem(
    cfg: TaskConfigGroups,
    env: str,
    judge: Judge,
    source: str,
    task_prompt: TaskPrompt,
    encode: Callable[[str], Sequence[int]],
) -> str:
    """Ask the environment; return an error text when it gives no reward, else an empty text."""
    ids = tuple(encode(task_prompt.answer)) if judge.wants_tokens else ()
    question = first_question(task_prompt, max_turns=cfg.env[env].max_turns, response_ids=ids)
    (feedback,) = await judge.step([question])
    if feedback.failure is None:
        return ""
    remedy = kind_of(cfg.env[env]).start_remedy.format(env=env)
    return (
        f"env.{env} (kind={cfg.env[env].kind}) was asked once before training, and gave no reward\n"
        f"asked: the first problem of source {source}, with its reference answer as the response: "
        f"prompt {_shown(task_prompt.prompt)}, response {_shown(task_prompt.answer)}\n"
        f"answer: {feedback.failure.kind.name}: {feedback.failure.reason}\n"
        f"{remedy}; env.{env}.check_at_start=false starts without asking"
    )


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN_CHARACTERS else shown[:_MAX_SHOWN_CHARACTERS] + "..."


def check_records(
    section: Sequence[DatasetConfig],
    read: Sources,
    prompt_lengths: Callable[[Sequence[TaskPrompt]], Sequence[int]],
) -> None:
    """Check every prompt's values of the columns that the sources of ``section`` declare.

    ``read`` has the prompts of these sources. Raises ValueError for the first value that does not fit.
    """
    bounds = accumulate((report.num_prompts for report in read.reports), initial=0)
    for source, (start, stop) in zip(section, pairwise(bounds), strict=True):
        for index in range(start, stop) if source.columns else ():
            task_prompt = read.prompts[index]
            (num_tokens,) = prompt_lengths([task_prompt])
            for unfit in unfit_values(source, task_prompt, num_tokens):
                raise ValueError(
                    f"{source_name(source)}: the problem with the prompt {str(task_prompt.prompt)[:80]!r} "
                    f"cannot be used: {unfit}"
                ) from unfit
