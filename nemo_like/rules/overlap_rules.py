"""Checks training while rollouts are still running: ``grpo.overlap`` and ``grpo.max_staleness``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_like.algorithms.estimator_kind import estimator_kind_of
from nemo_like.algorithms.options import ESTIMATOR_KINDS, FILTER_KINDS, Overlap, WeightUpdates
from nemo_like.cluster.options import Placement
from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.environments.registry import kind_of
from nemo_like.generation.engine_rules import in_flight_problems
from nemo_like.plan.derived import depends_on_timing, first_update_generations, groups_per_part
from nemo_like.plan.plan import updates_per_step
from nemo_like.rollout.options import JOURNAL_FOLDER
from nemo_like.rollout.tasks import task_environments, training_sampling, used_environments
from nemo_like.tripwires.options import Tripwires

# Estimators that look at one group alone, so that it gets its advantages before other groups have ended.
_SETTLE = "samples are never older than the weights with grpo.max_staleness=0"


def overlap_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every reason why a run could not train while rollouts are still running as configured."""
    if cfg.grpo.overlap is Overlap.exact:
        yield from _needs_engines_apart(cfg, "grpo.overlap=exact")
        yield from _whole_batches(cfg)
        yield from _first_update(cfg)
    if cfg.rollout.follow_journal is not None:
        yield from _followed_journal(cfg, f"rollout.follow_journal={cfg.rollout.follow_journal}")
    if cfg.rollout.max_tokens_per_step is not None:
        yield from _pieces_of_responses(cfg, f"rollout.max_tokens_per_step={cfg.rollout.max_tokens_per_step}")
    if cfg.grpo.max_staleness > 0:
        key = f"grpo.max_staleness={cfg.grpo.max_staleness}"
        yield from _needs_engines_apart(cfg, key)
        yield from _rollouts_ahead(cfg, key)
        if cfg.grpo.weight_updates is WeightUpdates.in_flight:
            yield from in_flight_problems(cfg.generation, cfg.policy)


def _followed_journal(cfg: Config, key: str) -> Iterator[Problem]:
    if not depends_on_timing(cfg):
        yield Problem(
            key=key,
            rule="would do nothing: without grpo.overlap=exact or grpo.max_staleness metrics do not depend "
            "on what ends first",
            remedy="leave it out",
        )
    elif not (Path(str(cfg.rollout.follow_journal)) / JOURNAL_FOLDER).is_dir():
        yield Problem(
            key=key,
            rule=f"must be the directory of a run with a journal; it has no {JOURNAL_FOLDER}/",
            remedy="name a RUN_DIR of a run with the same configuration",
        )


def _needs_engines_apart(cfg: Config, key: str) -> Iterator[Problem]:
    if cfg.cluster.placement is Placement.colocated and cfg.rollout.replay is None:
        yield Problem(
            key=key,
            rule="needs engines apart from the trainer: with cluster.placement=colocated they share its "
            "processors or GPUs",
            remedy="set cluster.placement=separate",
        )
    if cfg.rollout.generate_only:
        yield Problem(
            key=key,
            rule="would do nothing with rollout.generate_only=true, where nothing trains",
            remedy="leave it out",
        )


def _whole_batches(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for every key that needs the whole batch before its first group can train."""
    grpo, remedy = cfg.grpo, "or set grpo.overlap=off"
    if not estimator_kind_of(grpo).is_of_groups:
        of_groups = [name for name in ESTIMATOR_KINDS.names() if ESTIMATOR_KINDS.load(name).is_of_groups]
        yield Problem(
            key=f"grpo.adv_estimator.name={grpo.adv_estimator.name}",
            rule="needs the whole batch for its advantages, and grpo.overlap=exact trains on groups before "
            "all have ended",
            remedy=f"use {' or '.join(of_groups)}, {remedy}",
        )
    for name in filter(FILTER_KINDS.is_own, grpo.sample_filters):
        yield Problem(
            key=f"grpo.sample_filters={name}",
            rule="may compare the samples of the whole batch, and grpo.overlap=exact filters groups as they "
            "end",
            remedy=f"use filters that are shipped, {remedy}",
        )
    if cfg.teacher is not None and cfg.teacher.models:
        yield Problem(
            key="teacher.models",
            rule="scores each model's samples together with others of the batch, and grpo.overlap=exact "
            "scores groups as they end",
            remedy=f"use one teacher, {remedy}",
        )


def _first_update(cfg: Config) -> Iterator[Problem]:
    """Yield a problem when a part of a rollout would not divide over the replicas, or over the updates."""
    grpo, size, num_groups = cfg.grpo, cfg.policy.train_global_batch_size, groups_per_part(cfg) or 1
    if grpo.num_prompts_per_step % num_groups:
        replicas = f"policy.data_parallel_size={cfg.policy.data_parallel_size}"
        if cfg.teacher is not None:
            replicas += f" and of teacher.data_parallel_size={cfg.teacher.data_parallel_size}"
        yield Problem(
            key=f"grpo.num_prompts_per_step={grpo.num_prompts_per_step}",
            rule=f"must be a multiple of {replicas} with grpo.overlap=exact, so that each part divides over "
            "the replicas",
            remedy=f"try {-(-grpo.num_prompts_per_step // num_groups) * num_groups}",
        )
    if updates_per_step(cfg) == grpo.num_epochs_per_rollout:  # the first update has all samples
        return
    if not grpo.mix_groups_in_updates:
        yield Problem(
            key="grpo.mix_groups_in_updates=false",
            rule="lets the first of several updates wait for certain groups, and grpo.overlap=exact takes "
            "groups as they end",
            remedy=f"set it to true, or policy.train_global_batch_size={cfg.grpo.num_samples_per_step}",
        )
    elif size % grpo.num_prompts_per_step or first_update_generations(cfg) % grpo.samples_kept_together:
        share = grpo.num_prompts_per_step * grpo.samples_kept_together
        yield Problem(
            key=f"policy.train_global_batch_size={size}",
            rule=f"must be a multiple of {share} with grpo.overlap=exact, so that the first update has "
            "equally many samples of each of grpo.num_prompts_per_step groups",
            remedy=f"try {max(1, size // share) * share}, or a smaller grpo.samples_kept_together; "
            "1 needs policy.sequence_packing.share_prompts=false",
        )


def _rollouts_ahead(cfg: Config, key: str) -> Iterator[Problem]:
    if cfg.rollout.replay is not None:
        yield Problem(
            key=key,
            rule=f"would do nothing with rollout.replay={cfg.rollout.replay}, where nothing is generated",
            remedy="set grpo.max_staleness=0; a recording of stale samples is replayed as it is",
        )
    agents = {name: env for name, env in used_environments(cfg).items() if kind_of(env).calls_policy}
    for name, env in agents.items():
        yield Problem(
            key=f"env.{name}.kind={env.kind}",
            rule=f"records one policy version for a session, and with {key} it may have several",
            remedy=f"use another kind of environment; {_SETTLE}",
        )
    if cfg.debug.tripwires is Tripwires.all:
        yield Problem(
            key="debug.tripwires=all",
            rule=f"has engines score a canary when nothing is under way, and {key} keeps rollouts under way",
            remedy="set debug.tripwires=cheap",
        )
    if cfg.loss_fn.force_on_policy_ratio:
        yield Problem(
            key="loss_fn.force_on_policy_ratio=true",
            rule=f"takes samples for those of the weights that train, and with {key} they are of older ones",
            remedy=f"set it to false; {_SETTLE}",
        )
    needed = cfg.grpo.max_staleness + 2
    if cfg.data_plane.max_open_partitions < needed:
        yield Problem(
            key=f"data_plane.max_open_partitions={cfg.data_plane.max_open_partitions}",
            rule=f"must be at least {needed} with {key}: a partition for each step that may be under way, "
            "and one that is being closed",
            remedy=f"try {needed}",
        )


def _pieces_of_responses(cfg: Config, key: str) -> Iterator[Problem]:
    if cfg.grpo.max_staleness == 0:
        yield Problem(
            key=key,
            rule="would do nothing with grpo.max_staleness=0, where no rollout is ahead of its step",
            remedy="leave it out, or set grpo.max_staleness=1",
        )
    for name in task_environments(cfg):
        task = training_sampling(cfg, name)
        if task.sampling.stop_strings:
            yield Problem(
                key=task.keys["stop_strings"],
                rule=f"may lie across two pieces of a response, for which {key} makes several requests",
                remedy="set it to [], so that the end-of-sequence token ends responses, or leave "
                "rollout.max_tokens_per_step out",
            )
        if task.sampling.structured_outputs is not None:
            rule = f"begins anew with each request, and {key} makes several of a response"
            yield Problem(key=task.keys["structured_outputs"], rule=rule, remedy=f"leave {key} out")
