"""Validates a configuration before anything is started: limits of single keys, and rules over several keys.

A rule is skipped while one of its keys is beyond its limits. Rules that span parts are here and in the
``*_rules`` modules beside this one. A rule on one part stands beside that part, even when it reads other
parts' keys, and takes the groups that it reads; rules on the machine are in ``plan.machine_rules``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from nemo_like.algorithms.loss_rules import loss_problems
from nemo_like.algorithms.reward_rules import reward_problems
from nemo_like.checkpoint.checkpointing_rules import checkpointing_problems
from nemo_like.config.keys import beyond_limits
from nemo_like.config.problems import ConfigError, Problem, without_secrets
from nemo_like.configuration import Config
from nemo_like.data.data_rules import MAX_ARITHMETIC_DIGITS
from nemo_like.data.source_kind import source_kind_of
from nemo_like.data.sources import data_sources
from nemo_like.data_plane.storage_kind import data_plane_problems
from nemo_like.generation.engine_rules import cache_size_problems
from nemo_like.observability.logger_rules import step_problems
from nemo_like.plan.machine_rules import Machine, machine_problems
from nemo_like.plan.placement_rules import placement_problems
from nemo_like.plan.plan import updates_per_step
from nemo_like.policy.backends.backend_rules import backend_problems
from nemo_like.policy.backends.library_arguments import engine_argument_problems
from nemo_like.policy.groups.critic_rules import critic_model_problems
from nemo_like.policy.groups.group_rules import group_problems
from nemo_like.policy.groups.model_rules import external_lib_problems
from nemo_like.policy.groups.training_rules import batch_problems, learning_rate_problems
from nemo_like.policy.options import ValueConfig, WorkerGroupConfig
from nemo_like.rollout.form_rules import form_problems
from nemo_like.rollout.task_rules import task_problems
from nemo_like.rules.checkpoint_rules import checkpoint_problems, other_checkpoint_problems
from nemo_like.rules.distillation_rules import (
    teacher_model_problems,
    teacher_problems,
)
from nemo_like.rules.evaluation_rules import evaluation_problems
from nemo_like.rules.feature_rules import agent_run_problems, speculation_problems
from nemo_like.rules.metric_rules import metric_problems
from nemo_like.rules.overlap_rules import overlap_problems
from nemo_like.rules.rollout_rules import rollout_problems
from nemo_like.rules.shaping_rules import shaping_problems
from nemo_like.rules.update_rules import update_problems
from nemo_like.rules.value_rules import critic_problems
from nemo_like.rules.weight_rules import weight_problems

# Groups of keys that decide which processes run where.
_PLACED_GROUPS = ("policy.", "value.", "teacher.", "generation.", "cluster.")
_BESIDE_POLICY = ("value.", "teacher.")


def validate(cfg: Config, machine: Machine = Machine.this) -> None:
    """Raise ConfigError, which lists all problems found, unless this configuration can run on ``machine``."""
    broken = _out_of_range(cfg)
    problems = list(broken.values())
    for rule in _RULES:
        if not broken.keys() & rule.keys:
            problems += rule.check(cfg)
    if not any(key.startswith("policy.") for key in broken):
        problems += group_problems("policy", cfg.policy, cfg.grpo)
    problems += agent_run_problems(cfg)
    problems += task_problems(cfg)
    problems += form_problems(cfg)
    problems += reward_problems(cfg.grpo)
    problems += shaping_problems(cfg)
    problems += checkpointing_problems(cfg.checkpointing)
    problems += step_problems(cfg.logger, cfg.grpo.max_num_steps, cfg.policy.device)
    problems += rollout_problems(cfg)
    problems += evaluation_problems(cfg, machine)
    problems += loss_problems(cfg.loss_fn, cfg.grpo)
    problems += update_problems(cfg)
    problems += backend_problems("policy", cfg.policy)
    problems += external_lib_problems(cfg.policy)
    if not any(key.startswith(_PLACED_GROUPS) for key in broken):
        problems += placement_problems(cfg)
    if not broken:
        problems += overlap_problems(cfg)
    problems += weight_problems(cfg)
    problems += engine_argument_problems(cfg.generation, cfg.grpo)
    problems += cache_size_problems(cfg.generation, cfg.policy)
    problems += speculation_problems(cfg)
    if not any(key.startswith("data_plane.") for key in broken):
        problems += data_plane_problems(cfg.data_plane)
    if not any(key.startswith("grpo.") for key in broken):
        problems += metric_problems(cfg)
    if not any(key.startswith(("value.", "teacher.")) for key in broken):
        problems += checkpoint_problems(cfg, machine)
        problems += _beside_policy(cfg, broken.keys(), machine, found=problems)
        if cfg.value is not None:
            problems += critic_model_problems(cfg.value, cfg.policy)
        if cfg.teacher is not None:
            problems += teacher_model_problems(cfg, cfg.teacher, machine)
    problems += critic_problems(cfg)
    problems += teacher_problems(cfg)
    problems += machine_problems(cfg, machine)
    reported = broken.values()
    problems = [
        one for one in dict.fromkeys(problems) if one in reported or one.key.partition("=")[0] not in broken
    ]
    if problems:
        raise ConfigError(list(without_secrets(problems, cfg)))


def _beside_policy(
    cfg: Config, broken: Collection[str], machine: Machine, *, found: Sequence[Problem]
) -> Iterator[Problem]:
    """Yield every problem of the keys that critic and teacher share with the policy, without the problems
    that ``found`` has for the policy in the same words."""
    groups = {"value": cfg.value, "teacher": cfg.teacher}
    for name, group in groups.items():
        if group is not None:
            own, as_of_policy = (
                _of_group(called, group, cfg, broken, machine) for called in (name, "policy")
            )
            yield from (one for one, other in zip(own, as_of_policy, strict=True) if other not in found)


def _out_of_range(cfg: Config) -> dict[str, Problem]:
    """Return the problem of every number that is beyond its limits, by its key. A number that critic and
    teacher inherit from the policy is reported once, under policy."""
    broken = {problem.key.partition("=")[0]: problem for problem in beyond_limits(cfg)}
    of_policy = {problem.key for problem in broken.values()}
    return {
        key: problem
        for key, problem in broken.items()
        if not key.startswith(_BESIDE_POLICY) or f"policy.{problem.key.partition('.')[2]}" not in of_policy
    }


def _of_group(
    name: str, group: WorkerGroupConfig, cfg: Config, broken: Collection[str], machine: Machine
) -> Iterator[Problem]:
    """Yield every problem of the keys that the critic or teacher, called ``name``, shares with the policy.
    ``broken`` are the keys that are beyond their limits."""
    needed = {rule.check: rule.keys for rule in _RULES}
    if isinstance(group, ValueConfig) and not needed[_batch_sizes].intersection(broken):
        yield from batch_problems(name, group, cfg.grpo)
    if isinstance(group, ValueConfig) and not needed[_scheduler].intersection(broken):
        per_epoch = cfg.grpo.num_samples_per_step // group.train_global_batch_size
        num_updates = cfg.grpo.max_num_steps * per_epoch * group.num_epochs_per_rollout
        yield from learning_rate_problems(name, group, num_updates)
    if not any(key.startswith("policy.") for key in broken):
        yield from group_problems(name, group, cfg.grpo)
    yield from backend_problems(name, group)
    yield from other_checkpoint_problems(name, group, cfg, machine)


@dataclass(frozen=True, slots=True)
class _Rule:
    keys: frozenset[str]
    check: Callable[[Config], Iterator[Problem]]


_RULES: list[_Rule] = []


def _rule(
    *keys: str,
) -> Callable[[Callable[[Config], Iterator[Problem]]], Callable[[Config], Iterator[Problem]]]:
    """Register a rule together with the keys whose limits it assumes."""

    def register(check: Callable[[Config], Iterator[Problem]]) -> Callable[[Config], Iterator[Problem]]:
        _RULES.append(_Rule(frozenset(keys), check))
        return check

    return register


@_rule(
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "policy.train_global_batch_size",
    "policy.data_parallel_size",
)
def _batch_sizes(cfg: Config) -> Iterator[Problem]:
    yield from batch_problems("policy", cfg.policy, cfg.grpo)


@_rule("generation.max_new_tokens", "policy.max_total_sequence_length")
def _lengths(cfg: Config) -> Iterator[Problem]:
    new, total = cfg.generation.max_new_tokens, cfg.policy.max_total_sequence_length
    if new >= total:
        yield Problem(
            key=f"generation.max_new_tokens={new}",
            rule=f"must be below policy.max_total_sequence_length={total}, which holds the prompt too",
            remedy=f"raise policy.max_total_sequence_length, or try at most {total // 2}",
        )


@_rule("generation.max_new_tokens", "policy.max_total_sequence_length")
def _known_lengths(cfg: Config) -> Iterator[Problem]:
    """Yield a problem when prompts and answers whose lengths follow from the data's keys would not fit."""
    sources = [source for _, source in data_sources(cfg.data)]
    known = [lengths(one) for one in sources if (lengths := source_kind_of(one).lengths) is not None]
    if not known or any(not 1 <= one.digits <= MAX_ARITHMETIC_DIGITS for one in sources):
        return
    prompt, answer = max(known)
    new, total = cfg.generation.max_new_tokens, cfg.policy.max_total_sequence_length
    if new <= answer:
        yield Problem(
            key=f"generation.max_new_tokens={new}",
            rule=f"cannot hold the answers of data, which have {answer} tokens, and the end",
            remedy=f"try {answer + 1}",
        )
    elif new < total < prompt + new:
        yield Problem(
            key=f"policy.max_total_sequence_length={total}",
            rule=f"cannot hold a prompt of {prompt} tokens and max_new_tokens={new}",
            remedy=f"try {prompt + new} or more",
        )


@_rule("generation.num_engines", "grpo.num_prompts_per_step")
def _engines(cfg: Config) -> Iterator[Problem]:
    engines, prompts = cfg.generation.num_engines, cfg.grpo.num_prompts_per_step
    if engines > prompts:
        yield Problem(
            key=f"generation.num_engines={engines}",
            rule=f"is more than grpo.num_prompts_per_step={prompts}, so engines would idle",
            remedy=f"try {prompts}",
        )


@_rule(
    "grpo.max_num_steps",
    "grpo.num_epochs_per_rollout",
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "policy.train_global_batch_size",
    "policy.data_parallel_size",
    "policy.optimizer.lr",
    "policy.scheduler.warmup_updates",
    "policy.scheduler.decay_updates",
    "policy.scheduler.min_lr",
    "value.warmup_steps",
)
def _scheduler(cfg: Config) -> Iterator[Problem]:
    if any(_batch_sizes(cfg)):  # otherwise the number of updates is wrong
        return
    num_steps = cfg.grpo.max_num_steps - (0 if cfg.value is None else cfg.value.warmup_steps)
    yield from learning_rate_problems("policy", cfg.policy, num_steps * updates_per_step(cfg))
