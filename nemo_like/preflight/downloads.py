"""Brings the checkpoints that a configuration names as on the Hugging Face hub onto this machine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.environments.registry import reward_model
from nemo_like.models.checkpoint_files import how_to_get
from nemo_like.models.hub_models import NotOnHub, hub_checkpoint, is_hub_name
from nemo_like.policy.options import WorkerGroupConfig

_Group = TypeVar("_Group", bound=WorkerGroupConfig)


def with_downloads(cfg: Config) -> Config:
    """Return the configuration with directories in the place of checkpoints' names on the hub, which are
    downloaded where this machine lacks them.

    Raises ConfigError for a name that is neither a directory nor a checkpoint on the hub.
    """

    def found(key: str, name: str) -> str:
        try:
            return hub_checkpoint(name)
        except NotOnHub as error:
            rule = f"is not a directory, and does not come from the Hugging Face hub: {error}"
            remedy = how_to_get(name, cfg.data.train, cfg.grpo.seed)
            raise ConfigError.of(f"{key}={name}", rule, remedy) from error

    return _with_directories(cfg, found)


def with_downloaded(cfg: Config) -> Config:
    """Return the configuration with directories in the place of those names on the hub whose checkpoints are
    on this machine already. Other names stay, and nothing is downloaded.
    """

    def found(key: str, name: str) -> str:
        with suppress(NotOnHub):
            return hub_checkpoint(name, may_download=False)
        return name

    return _with_directories(cfg, found)


def _with_directories(cfg: Config, found: Callable[[str, str], str]) -> Config:
    """Return the configuration with ``found(key, name)`` in the place of each name on the hub."""

    def named(key: str, name: str) -> str:
        return found(key, name) if is_hub_name(name) else name

    def of_group(key: str, group: _Group) -> _Group:
        return replace(group, model_name=named(f"{key}.model_name", group.model_name))

    teacher = cfg.teacher
    if teacher is not None:
        models = {task: named(f"teacher.models.{task}", name) for task, name in teacher.models.items()}
        teacher = replace(of_group("teacher", teacher), models=models)
    judges = {}
    for name, env in cfg.env.items():
        if (judge := reward_model(env)) is not None:
            model = named(f"env.{name}.options.model_name", judge.model_name)
            judges[name] = replace(env, options={**env.options, "model_name": model})
    return replace(
        cfg,
        policy=of_group("policy", cfg.policy),
        value=None if cfg.value is None else of_group("value", cfg.value),
        teacher=teacher,
        env={**cfg.env, **judges},
    )
