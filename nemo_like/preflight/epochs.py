"""Makes steps of ``grpo.max_num_epochs``: the training prompts are counted before a run, as the run will find
them.

    load() ─▶ cfg ─▶ count_prompts, in a child process ─▶ steps ─▶ load("grpo.max_num_steps=STEPS")

All that follows ``grpo.max_num_steps``, such as the decay of the learning rate, then follows the real number
of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nemo_like.child_process.parent_side import ChildFailed
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.data.source_kind import is_here
from nemo_like.models.model_info import is_here as is_model_here
from nemo_like.models.remote_code import allowing_code
from nemo_like.plan.machine_rules import Machine
from nemo_like.plan.run_length import steps_of_epochs
from nemo_like.preflight.child import ChildCall
from nemo_like.preflight.notes import Note, NoteStatus
from nemo_like.rollout.tasks import max_prompt_tokens
from nemo_like.rules.rules import validate


class CountedRun(NamedTuple):
    """A configuration whose ``grpo.max_num_steps`` is no more than ``grpo.max_num_epochs`` allows."""

    cfg: Config
    notes: tuple[Note, ...]  # on the epochs, where there are any


def with_counted_epochs(load: Callable[[Sequence[str]], Config], machine: Machine) -> CountedRun:
    """Return the configuration that ``load`` gives, with the steps of its epochs.

    ``load`` gets further arguments, and returns the configuration that it makes with them. On another machine
    the steps stay as they are where data or tokenizer are not here. Raises ConfigError when the prompts
    cannot be counted, or are too few for a step.
    """
    cfg = load(())
    epochs = cfg.grpo.max_num_epochs
    if epochs is None or cfg.evaluation is not None or cfg.rollout.replay is not None:
        return CountedRun(cfg, ())
    key = f"grpo.max_num_epochs={epochs:g}"
    if machine is Machine.another and not _is_all_here(cfg):
        text = f"{key}: data or tokenizer are not here, so the steps are those of grpo.max_num_steps"
        return CountedRun(cfg, (Note(NoteStatus.not_checked, text),))
    sizes = _counted(cfg, key, machine)
    num_steps, prompts = steps_of_epochs(cfg, sizes), cfg.grpo.rollout_shape.num_prompts
    if not num_steps:
        rule = f"is less than one step of {prompts} prompts, and data.train has {sum(sizes)}"
        raise ConfigError.of(key, rule, "raise it, or lower grpo.num_prompts_per_step")
    text = f"{key}: {num_steps:,} steps, which begin with {prompts:,} prompts of {sum(sizes):,} each"
    if num_steps >= cfg.grpo.max_num_steps:
        text += f"; grpo.max_num_steps={cfg.grpo.max_num_steps} comes first"
    else:
        cfg = load([f"grpo.max_num_steps={num_steps}"])
    return CountedRun(cfg, (Note(NoteStatus.checked, text),))


def count_prompts(cfg: Config) -> list[int]:
    """Return how many prompts of each training source are short enough for the run. Runs in a child
    process."""
    from nemo_like.data.datasets import build_sources
    from nemo_like.data.encoder import PromptEncoder
    from nemo_like.environments.environment_data import EnvironmentPrompts

    limit = max_prompt_tokens(cfg)
    encoder = PromptEncoder(cfg.policy.model_name, cfg.data.chat_template, limit)
    read = build_sources(
        cfg.data.train,
        "train",
        prompt_lengths=encoder.lengths,
        max_prompt_tokens=limit,
        environments=EnvironmentPrompts(cfg.env),
    )
    return [report.num_prompts for report in read.reports]


def _counted(cfg: Config, key: str, machine: Machine) -> list[int]:
    """Return the numbers of prompts of the training sources. Raises ConfigError, which has the mistakes of
    the configuration where it has any, since they may be why the prompts cannot be counted."""
    try:
        timeout_s = cfg.cluster.start_timeout_s
        with allowing_code(cfg.policy), ChildCall(count_prompts, cfg, timeout_s=timeout_s) as child:
            sizes: list[int] = child.result()
    except ChildFailed as error:
        validate(cfg, machine)
        raise ConfigError.of(
            key, f"needs the training prompts counted: {error}", "correct data.train"
        ) from error
    return sizes


def _is_all_here(cfg: Config) -> bool:
    return is_model_here(cfg.policy.model_name) and all(map(is_here, cfg.data.train))
