"""Brings the checkpoints that a configuration names as on the Hugging Face hub onto this machine.

Models that the configuration changes get directories of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.environments.registry import reward_model
from nemo_like.models.changed_model import TOKENIZER_CONFIG, changed_model, num_token_ids
from nemo_like.models.checkpoint_files import how_to_get
from nemo_like.models.hub_models import NotOnHub, hub_checkpoint, is_hub_name
from nemo_like.models.model_info import planned_shape, read_model_info
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


def _with_changes(key: str, name: str, overrides: Mapping[str, Any], tokenizer: str | None) -> str:
    """Return the directory of the model ``name`` with the changes of its group ``key``; the name itself where
    neither the model nor its sizes are here. Raises ConfigError for a directory without a tokenizer."""
    other = None if tokenizer is None else Path(tokenizer)
    if other is not None and other.is_dir() and not (other / TOKENIZER_CONFIG).is_file():
        rule = f"holds no tokenizer ({TOKENIZER_CONFIG})"
        raise ConfigError.of(f"policy.tokenizer={tokenizer}", rule, "null is the model's own")
    directory = planned_shape(name)
    if directory is None or not (overrides or other):
        return name
    num_ids, num_rows = (0 if other is None else num_token_ids(other)), _vocabulary(directory)
    if num_rows is not None and num_ids > num_rows:
        rule = f"has {num_ids} token ids, and the model has {num_rows}"
        raise ConfigError.of(f"policy.tokenizer={tokenizer}", rule, "name a tokenizer that fits the model")
    try:
        changed = changed_model(directory, overrides, other if other is not None and other.is_dir() else None)
    except ValueError as error:
        rule = f"cannot be changed by {key}.model_overrides: {error}"
        raise ConfigError.of(f"{key}.model_name={name}", rule, "correct its config.json") from error
    return name if changed == directory else str(changed)


def _vocabulary(directory: Path) -> int | None:
    with suppress(ConfigError):
        return read_model_info(str(directory), None).vocab_size
    return None


def _with_directories(cfg: Config, found: Callable[[str, str], str]) -> Config:
    """Return the configuration with ``found(key, name)`` in the place of each name on the hub."""

    def named(key: str, name: str) -> str:
        return found(key, name) if is_hub_name(name) else name

    own_tokenizer = cfg.policy.tokenizer
    if own_tokenizer is not None:
        own_tokenizer = named("policy.tokenizer", own_tokenizer)

    def of_group(key: str, group: _Group) -> _Group:
        is_policys = group.model_name == cfg.policy.model_name
        name = named(f"{key}.model_name", group.model_name)
        tokenizer = own_tokenizer if is_policys else None
        return replace(group, model_name=_with_changes(key, name, group.model_overrides, tokenizer))

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
