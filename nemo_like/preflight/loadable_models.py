"""Loads checkpoints that bring Python code as the processes of a run will. Runs in a child process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.models.model_info import is_here
from nemo_like.models.remote_code import (
    brings_code,
    import_external_libs,
    loading_arguments,
    needs_trust,
    untrusted,
)
from nemo_like.policy.options import WorkerGroupConfig


def models_with_code(cfg: Config) -> dict[str, tuple[str, WorkerGroupConfig]]:
    """Return the checkpoints on this machine that bring code, and the worker groups that compute them, by the
    key that names them."""
    groups = {"policy": cfg.policy, "value": cfg.value, "teacher": cfg.teacher}
    named = {f"{name}.model_name": (group.model_name, group) for name, group in groups.items() if group}
    if cfg.teacher is not None:
        named |= {f"teacher.models.{task}": (path, cfg.teacher) for task, path in cfg.teacher.models.items()}
    return {key: one for key, one in named.items() if is_here(one[0]) and brings_code(Path(one[0]))}


def loading_problems(cfg: Config) -> list[Problem]:
    """Return every problem of ``policy.external_lib``, or else of the checkpoints that bring code."""
    try:
        import_external_libs()
    except Exception as error:
        return [
            Problem(
                key=f"policy.external_lib=[{', '.join(cfg.policy.external_lib)}]",
                rule=f"cannot be imported: {type(error).__name__}: {error}",
                remedy="install its modules, put them beside the configuration, or on PYTHONPATH",
            )
        ]
    return [*_checkpoint_problems(cfg)]


def _checkpoint_problems(cfg: Config) -> Iterator[Problem]:
    for key, (checkpoint, group) in models_with_code(cfg).items():
        try:
            _load(Path(checkpoint), group)
        except Exception as error:
            if needs_trust(error) and not cfg.policy.trust_remote_code:
                yield untrusted(key, checkpoint)
                continue
            reason = "; ".join(str(error).strip().splitlines()[:3])
            yield Problem(
                key=f"{key}={checkpoint}",
                rule=f"brings Python code that cannot be loaded: {type(error).__name__}: {reason}",
                remedy="",
            )


def _load(checkpoint: Path, group: WorkerGroupConfig) -> None:
    from transformers import AutoConfig, AutoTokenizer

    AutoConfig.from_pretrained(checkpoint, local_files_only=True, **loading_arguments())
    AutoTokenizer.from_pretrained(checkpoint, local_files_only=True, **loading_arguments())
    if group.backend == "fsdp":
        from nemo_like.policy.fsdp.model import empty_model

        empty_model(checkpoint)
