"""Checks the group ``teacher``, for loss_fn.kind=distillation or a user's own loss.

The rules of ``policy.groups`` and ``policy.backends`` check the keys that all worker groups have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from nemo_like.algorithms.loss_traits import has_teacher, is_own_loss, learns_from_teacher_alone
from nemo_like.batch.recordings import read_manifest
from nemo_like.cluster.options import Placement
from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.plan.machine_rules import Machine
from nemo_like.policy.groups.layout import is_one_engine
from nemo_like.policy.groups.policy_reader_rules import (
    reader_model_problems,
    reader_problems,
    vocabulary_problems,
)
from nemo_like.policy.groups.teacher_rules import (
    architecture_problems,
    teaching_engine_problems,
    teaching_model_problems,
)
from nemo_like.policy.options import Device, TeacherConfig
from nemo_like.rollout.tasks import training_tasks
from nemo_like.rules.checkpoint_rules import other_checkpoint_problems


def teacher_problems(cfg: Config) -> Iterator[Problem]:
    """Yield a problem when a teacher is missing, superfluous, or combined with keys that exclude one."""
    if cfg.teacher is None:
        if has_teacher(cfg.loss_fn):
            yield Problem(
                key=f"loss_fn.kind={cfg.loss_fn.kind}",
                rule="needs a teacher, which the student is compared with",
                remedy="add `- teacher: default` to the defaults, or teacher=default to the command line, "
                "and set teacher.model_name",
            )
        return
    if not (has_teacher(cfg.loss_fn) or is_own_loss(cfg.loss_fn)):
        yield Problem(
            key="teacher",
            rule=f"is a teacher, which nobody asks with loss_fn.kind={cfg.loss_fn.kind}",
            remedy="set loss_fn.kind=distillation, or leave the group teacher out",
        )
    yield from _of_the_group(cfg, cfg.teacher)
    if cfg.teacher.models:
        yield from _tasks(cfg, cfg.teacher)
    if learns_from_teacher_alone(cfg.loss_fn):
        yield from _without_rewards(cfg)
    if is_one_engine(cfg.teacher):
        yield from teaching_engine_problems(cfg.teacher, cfg.generation.temperature)


def _without_rewards(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for every key of rewards or advantages: a loss with reward_weight=0 ignores them."""
    chosen = {
        "value": cfg.value is not None,
        "loss_fn.use_kl_in_reward=true": cfg.loss_fn.use_kl_in_reward,
        "grpo.use_leave_one_out_baseline=true": cfg.grpo.use_leave_one_out_baseline,
        "grpo.reward_scaling.enabled=true": cfg.grpo.reward_scaling.enabled,
        "grpo.reward_shaping.enabled=true": cfg.grpo.reward_shaping.enabled,
    }
    for key in (key for key, is_chosen in chosen.items() if is_chosen):
        yield Problem(
            key=key,
            rule="has no effect with loss_fn.reward_weight=0: the policy learns from its teacher alone",
            remedy="set loss_fn.reward_weight above 0, or "
            + ("leave the group value out" if key == "value" else "this to false"),
        )


def _of_the_group(cfg: Config, teacher: TeacherConfig) -> Iterator[Problem]:
    if teacher.device is Device.cuda and cfg.cluster.placement is Placement.colocated:
        yield Problem(
            key="teacher",
            rule="needs GPUs of its own, and cluster.placement=colocated gives it the policy's",
            remedy="set cluster.placement=separate",
        )
    num_samples = cfg.grpo.num_samples_per_step
    if teacher.data_parallel_size >= 1 and num_samples % teacher.data_parallel_size:
        yield Problem(
            key=f"teacher.data_parallel_size={teacher.data_parallel_size}",
            rule=f"must divide the {num_samples} samples of a step",
            remedy="use a divisor, or another number of prompts",
        )
    yield from reader_problems("teacher", "teacher", teacher, cfg.policy)


def _tasks(cfg: Config, teacher: TeacherConfig) -> Iterator[Problem]:
    """Yield a problem for every task of ``teacher.models`` to which no training sample can belong."""
    tasks, whose = training_tasks(cfg), "the training data, whose sources"
    if cfg.rollout.replay is not None:
        try:
            recorded = read_manifest(Path(cfg.rollout.replay)).tasks
        except ValueError:  # reported elsewhere
            return
        if recorded is None:
            yield Problem(
                key="teacher.models",
                rule=f"needs the tasks of samples, which the recording {cfg.rollout.replay} does not name",
                remedy="record again, or leave teacher.models empty",
            )
            return
        tasks, whose = [*recorded], f"the recording {cfg.rollout.replay}, whose samples"
    for name in teacher.models:
        if name not in tasks:
            close = get_close_matches(name, tasks, n=1)
            yield Problem(
                key=f"teacher.models.{name}",
                rule=f"is no task of {whose} name {', '.join(tasks)}",
                remedy=f"did you mean {close[0]}?"
                if close
                else "a task is named as its environment, env.NAME, which a source of data.train names",
            )


def teacher_model_problems(
    cfg: Config, teacher: TeacherConfig, machine: Machine = Machine.this
) -> Iterator[Problem]:
    """Yield every problem of the teacher's checkpoints compared with the policy's. Problems of one checkpoint
    alone are reported elsewhere."""
    yield from reader_model_problems("teacher", "teacher", teacher, cfg.policy)
    if is_one_engine(teacher):
        yield from teaching_model_problems(teacher, cfg.policy)
    for task, model in teacher.models.items():
        yield from _further_model(cfg, teacher, machine, key=f"teacher.models.{task}={model}", model=model)


def _further_model(
    cfg: Config, teacher: TeacherConfig, machine: Machine, *, key: str, model: str
) -> Iterator[Problem]:
    """Yield every problem of one of the teacher's further checkpoints."""
    group, of_name = replace(teacher, model_name=model), f"teacher.model_name={model}"
    # Other problems are also found in model_name, which has the same architecture.
    found = other_checkpoint_problems("teacher", group, cfg, machine)
    own = [one for one in found if one.key == of_name]
    yield from (replace(one, key=key) for one in own)
    directories = Path(teacher.model_name), Path(model)
    if own or not all(path.is_dir() for path in directories):
        return
    if different := list(architecture_problems(key, *directories)):
        yield from different
        return
    yield from vocabulary_problems(key, "teacher", Path(model), Path(cfg.policy.model_name))
