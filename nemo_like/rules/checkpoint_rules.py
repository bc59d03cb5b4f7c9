"""Checks that the model checkpoint of a worker group exists, is complete, and divides over its ranks."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path

from nemo_like.config.problems import ConfigError, Problem
from nemo_like.configuration import Config
from nemo_like.generation.engine_rules import engine_layout_problems, mixture_problems
from nemo_like.models.checkpoint_files import how_to_get, missing_files
from nemo_like.models.end_tokens import EndTokenError, stated_end_ids
from nemo_like.models.model_info import ModelInfo, is_here, planned_shape, read_model_info
from nemo_like.plan.host_memory import host_bytes, host_memory_problems
from nemo_like.plan.machine_rules import Machine
from nemo_like.plan.memory_timetable import gpu_bytes, memory_problems
from nemo_like.plan.placement_rules import placement_problems
from nemo_like.plan.run_models import run_models
from nemo_like.policy.groups.model_rules import (
    context_length_problems,
    image_problems,
    layout_problems,
)
from nemo_like.policy.options import WorkerGroupConfig
from nemo_like.rollout.tasks import task_environments, training_sampling, validation_sampling


def checkpoint_problems(cfg: Config, machine: Machine = Machine.this) -> Iterator[Problem]:
    """Yield every problem of the model checkpoint and of how the configuration divides it over ranks.

    For a run on another machine the checkpoint need not be here if the sizes of the model are known.
    """
    model = yield from _model("policy", cfg.policy, cfg, machine)
    if model is None:
        return
    yield from image_problems(cfg.policy, cfg.data, model)
    uneven = [
        *layout_problems("policy", cfg.policy, model),
        *mixture_problems(cfg.generation, cfg.policy, model),
    ]
    uneven += engine_layout_problems(cfg.generation, cfg.policy, model, is_used=cfg.rollout.replay is None)
    yield from uneven
    if not uneven:
        yield from _memory(cfg)
    yield from context_length_problems("policy", cfg.policy, model)
    yield from _stop_tokens(cfg, model)


def other_checkpoint_problems(
    name: str, group: WorkerGroupConfig, cfg: Config, machine: Machine = Machine.this
) -> Iterator[Problem]:
    """Yield every problem of the checkpoint of the worker group ``name``, which is not the policy."""
    model = yield from _model(name, group, cfg, machine)
    if model is not None:
        yield from layout_problems(name, group, model)
        yield from context_length_problems(name, group, model)


def _model(
    name: str, group: WorkerGroupConfig, cfg: Config, machine: Machine
) -> Generator[Problem, None, ModelInfo | None]:
    """Yield the problems of a group's checkpoint directory; return the model, or None if it is unreadable."""
    model_name = group.model_name
    key, path = f"{name}.model_name={model_name}", Path(model_name)
    shape = planned_shape(model_name) if machine is Machine.another and not is_here(model_name) else None
    if shape is None and path.is_dir():
        yield from missing_files(key, path)
    elif shape is not None:
        path = shape
    else:
        yield Problem(
            key=key, rule="is not a directory", remedy=how_to_get(model_name, cfg.data.train, cfg.grpo.seed)
        )
        return None
    try:
        stated_end_ids(path)
    except EndTokenError as error:
        remedy = "write the ids of the tokens that end a response there"
        yield Problem(key=key, rule=str(error), remedy=remedy)
    try:
        return read_model_info(str(path), group.backend, name)
    except ConfigError as error:
        yield from error.problems
        return None


def _stop_tokens(cfg: Config, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem for each key whose stop tokens include one that the model does not have."""
    sourced = [
        resolve(cfg, env)
        for env in task_environments(cfg)
        for resolve in (training_sampling, validation_sampling)
    ]
    wrong = {
        one.keys["stop_token_ids"]: token
        for one in sourced
        for token in one.sampling.stop_token_ids
        if token >= model.vocab_size
    }
    for key, token in wrong.items():
        yield Problem(
            key=key,
            rule=f"has {token}, which is no token of the model: vocab_size={model.vocab_size}",
            remedy="take ids from the checkpoint's tokenizer.json, or name tokens by generation.stop_strings",
        )


def _memory(cfg: Config) -> Iterator[Problem]:
    of_gpu, of_host = gpu_bytes(cfg), host_bytes(cfg)
    if (of_gpu is None and of_host is None) or any(placement_problems(cfg)):
        return
    try:
        models = run_models(cfg)
    except ConfigError:  # the rules on critic and teacher report it
        return
    if of_gpu is not None:
        yield from memory_problems(cfg, models, of_gpu)
    if of_host is not None:
        yield from host_memory_problems(cfg, models, of_host)
