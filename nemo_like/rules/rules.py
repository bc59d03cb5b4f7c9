"""Validation of a configuration before anything is started: limits of single keys, and rules over several.

A rule is skipped while one of the keys that it relies on is beyond its limits. Rules that span parts are here
and in the ``*_rules`` modules beside this one; ``checkpoint_rules`` and ``machine_rules`` say what the model
checkpoint and the machine must be like. Rules on one part stand beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.config.keys import beyond_limits
from nemo_like.config.problems import ConfigError, Problem, without_secrets
from nemo_like.config.units import parse_duration_s
from nemo_like.configuration import Config
from nemo_like.data.data_rules import MAX_ARITHMETIC_DIGITS
from nemo_like.data.options import DatasetKind
from nemo_like.data.sources import data_sources
from nemo_like.data_plane.data_plane_rules import data_plane_problems
from nemo_like.plan.plan import updates_per_step
from nemo_like.policy.backend_rules import backend_problems
from nemo_like.policy.group_rules import group_problems
from nemo_like.policy.library_arguments import engine_argument_problems
from nemo_like.policy.options import Device, LRDecayStyle, TrainedGroupConfig, ValueConfig, WorkerGroupConfig
from nemo_like.rules.checkpoint_rules import checkpoint_problems, other_checkpoint_problems
from nemo_like.rules.evaluation_rules import evaluation_problems
from nemo_like.rules.loss_rules import loss_problems
from nemo_like.rules.machine_rules import Machine, machine_problems
from nemo_like.rules.metric_rules import metric_problems
from nemo_like.rules.overlap_rules import overlap_problems
from nemo_like.rules.placement_rules import placement_problems
from nemo_like.rules.reward_rules import reward_problems
from nemo_like.rules.rollout_rules import rollout_problems
from nemo_like.rules.speculation_rules import speculation_problems
from nemo_like.rules.task_rules import task_problems
from nemo_like.rules.teacher_rules import (
    teacher_model_problems,
    teacher_problems,
)
from nemo_like.rules.value_rules import (
    critic_model_problems,
    critic_problems,
)
from nemo_like.rules.weight_rules import weight_problems

# The groups of keys that say which processes go where.
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
    problems += [problem for problem in task_problems(cfg) if problem.key.partition("=")[0] not in broken]
    problems += reward_problems(cfg)
    problems += rollout_problems(cfg)
    problems += evaluation_problems(cfg, machine)
    problems += loss_problems(cfg)
    problems += backend_problems("policy", cfg.policy)
    if not any(key.startswith(_PLACED_GROUPS) for key in broken):
        problems += placement_problems(cfg)
    if not broken:
        problems += overlap_problems(cfg)
    problems += weight_problems(cfg)
    problems += engine_argument_problems(cfg.generation, cfg.grpo)
    problems += speculation_problems(cfg)
    if not any(key.startswith("data_plane.") for key in broken):
        problems += data_plane_problems(cfg.data_plane)
    if not any(key.startswith("grpo.") for key in broken):
        problems += metric_problems(cfg)
    if not any(key.startswith(("value.", "teacher.")) for key in broken):
        problems += checkpoint_problems(cfg, machine)
        problems += _beside_policy(cfg, broken.keys(), machine, told=problems)
        if cfg.value is not None:
            problems += critic_model_problems(cfg, cfg.value)
        if cfg.teacher is not None:
            problems += teacher_model_problems(cfg, cfg.teacher, machine)
    problems += critic_problems(cfg)
    problems += teacher_problems(cfg)
    problems += machine_problems(cfg, machine)
    if problems:
        raise ConfigError(list(without_secrets(problems, cfg)))


def _beside_policy(
    cfg: Config, broken: Collection[str], machine: Machine, *, told: Sequence[Problem]
) -> Iterator[Problem]:
    """Yield every problem of the keys that critic and teacher have like the policy. One that is ``told`` of
    the policy, in the same words but for the group's name, is not told again."""
    groups = {"value": cfg.value, "teacher": cfg.teacher}
    for name, group in groups.items():
        if group is not None:
            own, as_of_policy = (
                _of_group(called, group, cfg, broken, machine) for called in (name, "policy")
            )
            yield from (one for one, other in zip(own, as_of_policy, strict=True) if other not in told)


def _out_of_range(cfg: Config) -> dict[str, Problem]:
    """Return the problem of every number that is beyond its limits, by its key. What other worker groups have
    from the policy is told of the policy alone."""
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
    """Yield every problem of the keys that a critic or a teacher, called ``name``, has like the policy.
    ``broken`` are the keys that are beyond their limits."""
    needed = {rule.check: rule.keys for rule in _RULES}
    if isinstance(group, ValueConfig) and not needed[_batch_sizes].intersection(broken):
        yield from _batches(name, group, cfg.grpo)
    if isinstance(group, ValueConfig) and not needed[_scheduler].intersection(broken):
        per_epoch = cfg.grpo.num_samples_per_step // group.train_global_batch_size
        num_updates = cfg.grpo.max_num_steps * per_epoch * group.num_epochs_per_rollout
        yield from _learning_rate(name, group, num_updates)
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
    """Register a rule with the keys on whose limits it relies."""

    def register(check: Callable[[Config], Iterator[Problem]]) -> Callable[[Config], Iterator[Problem]]:
        _RULES.append(_Rule(frozenset(keys), check))
        return check

    return register


@_rule("grpo.num_generations_per_prompt")
def _leave_one_out(cfg: Config) -> Iterator[Problem]:
    size = cfg.grpo.num_generations_per_prompt
    if cfg.grpo.use_leave_one_out_baseline and cfg.grpo.normalize_rewards and size < 3:
        yield Problem(
            key=f"grpo.num_generations_per_prompt={size}",
            rule=(
                "must be at least 3 with use_leave_one_out_baseline=true and normalize_rewards=true, "
                "because the one other reward has no standard deviation"
            ),
            remedy="use a group of 3 or more, or set grpo.normalize_rewards=false",
        )


@_rule(
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "policy.train_global_batch_size",
    "policy.data_parallel_size",
)
def _batch_sizes(cfg: Config) -> Iterator[Problem]:
    yield from _batches("policy", cfg.policy, cfg.grpo)


def _batches(name: str, group: TrainedGroupConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    prompts, size = grpo.num_prompts_per_step, grpo.num_generations_per_prompt
    batch, ranks = group.train_global_batch_size, group.data_parallel_size
    num_samples = grpo.num_samples_per_step
    if num_samples % batch == 0 and batch % ranks == 0:
        return
    valid = [size for size in range(ranks, num_samples + 1, ranks) if num_samples % size == 0]
    if valid:
        remedy = f"try {_nearest(valid, batch)}"
    else:
        fitting = [count for count in range(1, prompts + ranks + 1) if count * size % ranks == 0]
        remedy = f"N is no multiple of {ranks}: try grpo.num_prompts_per_step={_nearest(fitting, prompts)}"
    yield Problem(
        key=f"{name}.train_global_batch_size={batch}",
        rule=(
            f"must divide the N = {prompts} prompts x {size} generations = {num_samples} samples of a step "
            f"and be a multiple of {name}.data_parallel_size={ranks}"
        ),
        remedy=remedy,
    )


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
def _arithmetic_lengths(cfg: Config) -> Iterator[Problem]:
    sources = [source for _, source in data_sources(cfg.data) if source.kind is DatasetKind.arithmetic]
    digits = max((source.digits for source in sources), default=0)
    new, total = cfg.generation.max_new_tokens, cfg.policy.max_total_sequence_length
    if not 1 <= digits <= MAX_ARITHMETIC_DIGITS:
        return
    if new < digits + 2:
        yield Problem(
            key=f"generation.max_new_tokens={new}",
            rule=f"cannot hold the sum of two numbers of {digits} digits: {digits + 1} digits and the end",
            remedy=f"try {digits + 2}",
        )
    elif new < total < 2 * digits + 2 + new:
        yield Problem(
            key=f"policy.max_total_sequence_length={total}",
            rule=f"cannot hold a prompt of {2 * digits + 2} tokens and max_new_tokens={new}",
            remedy=f"try {2 * digits + 2 + new} or more",
        )


@_rule()
def _early_stop(cfg: Config) -> Iterator[Problem]:
    if cfg.grpo.val_stop_threshold is not None and cfg.grpo.val_period == 0:
        yield Problem(
            key=f"grpo.val_stop_threshold={cfg.grpo.val_stop_threshold:g}",
            rule="stops nothing with grpo.val_period=0, which never validates between steps",
            remedy="set grpo.val_period, or grpo.val_stop_threshold=null",
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


@_rule("grpo.max_num_steps")
def _observed_steps(cfg: Config) -> Iterator[Problem]:
    asked = {"logger.trace_steps": cfg.logger.trace_steps, "logger.profile.steps": cfg.logger.profile.steps}
    for key, steps in asked.items():
        if any(not 1 <= step <= cfg.grpo.max_num_steps for step in steps):
            yield Problem(
                key=f"{key}={steps}",
                rule=f"must name steps from 1 to grpo.max_num_steps={cfg.grpo.max_num_steps}",
                remedy="the third step is past what only first steps do",
            )


@_rule()
def _nvtx_ranges(cfg: Config) -> Iterator[Problem]:
    if cfg.logger.nvtx_ranges and cfg.policy.device is Device.cpu:
        yield Problem(
            key="logger.nvtx_ranges=true",
            rule="needs policy.device=cuda",
            remedy="on CPU use logger.trace_steps or logger.profile",
        )


@_rule()
def _must_save_by(cfg: Config) -> Iterator[Problem]:
    limit = cfg.checkpointing.checkpoint_must_save_by
    if limit is None:
        return
    key = f"checkpointing.checkpoint_must_save_by={limit}"
    try:
        parse_duration_s(limit)
    except ValueError as error:
        yield Problem(key=key, rule=str(error), remedy="for 3 hours 50 minutes write '00:03:50:00'")
    if not cfg.checkpointing.enabled:
        yield Problem(key=key, rule="needs checkpointing.enabled=true", remedy="enable it, or set null")


@_rule("generation.vllm_cfg.kv_cache_gib")
def _kv_cache(cfg: Config) -> Iterator[Problem]:
    if cfg.policy.device is Device.cpu and cfg.generation.vllm_cfg.kv_cache_gib is None:
        yield Problem(
            key="generation.vllm_cfg.kv_cache_gib=null",
            rule="must be a size with policy.device=cpu, where an engine cannot measure free memory",
            remedy="try 1.0",
        )


@_rule(
    "grpo.max_num_steps",
    "grpo.num_epochs_per_rollout",
    "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt",
    "policy.train_global_batch_size",
    "policy.optimizer.lr",
    "policy.scheduler.warmup_updates",
    "policy.scheduler.decay_updates",
    "policy.scheduler.min_lr",
    "value.warmup_steps",
)
def _scheduler(cfg: Config) -> Iterator[Problem]:
    num_steps = cfg.grpo.max_num_steps - (0 if cfg.value is None else cfg.value.warmup_steps)
    yield from _learning_rate("policy", cfg.policy, num_steps * updates_per_step(cfg))


def _learning_rate(name: str, group: TrainedGroupConfig, total: int) -> Iterator[Problem]:
    scheduler, lr = group.scheduler, group.optimizer.lr
    if scheduler.decay_style is LRDecayStyle.constant:
        return
    if scheduler.min_lr > lr:
        rule = f"must be at most {name}.optimizer.lr={lr:g}"
        yield Problem(key=f"{name}.scheduler.min_lr={scheduler.min_lr:g}", rule=rule, remedy="")
    key = f"{name}.scheduler.decay_updates={scheduler.decay_updates}"
    if scheduler.decay_updates <= scheduler.warmup_updates:
        yield Problem(
            key=key,
            rule=f"must be above warmup_updates={scheduler.warmup_updates}, which it includes",
            remedy=f"the run makes {total} updates",
        )
    elif scheduler.min_lr == 0 and scheduler.decay_updates < total:
        yield Problem(
            key=key,
            rule=f"reaches a learning rate of 0 before the last of {total} updates",
            remedy=f"set it to {total}, or {name}.scheduler.min_lr above 0",
        )


def _nearest(values: list[int], wanted: int) -> str:
    """Return the values next to ``wanted`` on either side, as "4 or 8"."""
    below = [value for value in values if value < wanted]
    above = [value for value in values if value > wanted]
    return " or ".join(str(value) for value in below[-1:] + above[:1])
