"""Asks the installed libraries whether they accept the arguments that a configuration passes on to them.

Each question is asked in a child process, so that only this process loads the library.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from nemo_like.configuration import Config
from nemo_like.models.model_info import read_model_info
from nemo_like.models.remote_code import loading_arguments
from nemo_like.policy.backends.backend_kind import Library
from nemo_like.policy.backends.library_arguments import PassedArguments
from nemo_like.policy.options import TrainedGroupConfig, WorkerGroupConfig
from nemo_like.preflight.drafts import draft_problem, unknown_argument


def engine_argument_problem(cfg: Config, passed: PassedArguments, builds_config: bool) -> str | None:
    """Return why vLLM does not accept the arguments; None when no reason is found.

    With ``builds_config`` vLLM judges their values too, for which it needs the checkpoint, and the kind of
    device for which it was built.
    """
    import os

    from nemo_like.generation.environment import engine_environment

    os.environ |= engine_environment(cfg.policy.device)
    from vllm import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    if problem := unknown_argument(passed.values, known, passed.library.value):
        return problem
    if problem := draft_problem(cfg):
        return problem
    if not builds_config:
        return None
    from nemo_like.generation.engine_args import engine_args
    from nemo_like.plan.engine_of_run import engine_of_run

    try:
        engine_args(engine_of_run(cfg)).create_engine_config()
    except Exception as error:
        return f"is refused by vLLM: {_in_short(error)}"
    return None


def worker_argument_problem(group: WorkerGroupConfig, passed: PassedArguments) -> str | None:
    """Return why the trainer's library does not accept the arguments; None when it does."""
    if passed.library is Library.transformers:
        return _of_transformers(group, passed)
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    from nemo_like.policy.backends.devices import DTYPES
    from nemo_like.policy.groups.parallelism import parallel_layout
    from nemo_like.policy.megatron.model import transformer_config
    from nemo_like.policy.megatron.optimizer import optimizer_config

    kind: Any = TransformerConfig if passed.library is Library.megatron_model else OptimizerConfig
    if problem := unknown_argument(
        passed.values, {field.name for field in dataclasses.fields(kind)}, passed.library.value
    ):
        return problem
    try:
        if isinstance(group, TrainedGroupConfig) and passed.library is Library.megatron_optimizer:
            optimizer_config(group, DTYPES[group.precision])
        else:
            model = read_model_info(group.model_name, group.backend)
            transformer_config(model, group, parallel_layout(group))
    except Exception as error:
        return f"is refused by Megatron-core: {_in_short(error)}"
    return None


def _of_transformers(group: WorkerGroupConfig, passed: PassedArguments) -> str | None:
    from transformers import AutoConfig

    from nemo_like.policy.fsdp.model import BUILT_WITH, empty_model

    directory = Path(group.model_name)
    config = AutoConfig.from_pretrained(directory, **loading_arguments())
    if problem := unknown_argument(passed.values, {*BUILT_WITH, *vars(config)}, passed.library.value):
        return problem
    of_checkpoint = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if named := sorted(passed.values.keys() & of_checkpoint.keys()):
        return f"has {', '.join(named)}, which {directory}/config.json has for engines too; change it there"
    try:
        empty_model(directory, passed.values)
    except Exception as error:
        return f"is refused by transformers: {_in_short(error)}"
    return None


def _in_short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return "; ".join(lines[:3])
