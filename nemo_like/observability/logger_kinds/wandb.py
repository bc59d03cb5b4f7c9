"""Keeps metrics in Weights & Biases (W&B). Mode ``offline`` needs no network."""

from __future__ import annotations

import logging
import netrc
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from shlex import quote
from typing import Annotated, Any
from urllib.parse import urlparse

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.observability.logger_kind import LoggedRun, LoggerKind
from nemo_like.observability.summary import SampleAnswer

_FORBIDDEN = "/\\#?%:"
_MAX_NAME, _MAX_TAG = 128, 64


class WandbMode(Enum):
    online = "online"
    offline = "offline"
    disabled = "disabled"


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    mode: Annotated[
        WandbMode,
        Key("online (needs an API key), offline (files in the run directory) or disabled", WandbMode.offline),
    ]
    project: Annotated[str, Key("in which the run is shown", "nemo_like")]
    name: Annotated[str | None, Key("null: the name of the run directory", None)]
    entity: Annotated[
        str | None, Key("the team or user that owns the project; null: that of the API key", None)
    ]
    group: Annotated[str | None, Key("runs with the same group are shown together", None)]
    job_type: Annotated[str | None, Key("what kind of run it is within its group, for example train", None)]
    tags: Annotated[list[str], Key("e.g. [qwen3-8b, baseline]", [])]
    notes: Annotated[str | None, Key("a text about the run", None)]
    system_metrics: Annotated[
        bool, Key("W&B's own measurements of the driver's node: CPUs, memory, disk, network, GPUs", True)
    ]


def end_processes() -> None:
    """Kill the W&B processes that this process started; a call that waits for them then ends in an error."""
    import psutil

    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("wandb"):
                process.kill()


class WandbRecorder:
    """A ``Recorder`` that writes a W&B run, with its files in ``wandb`` below the run directory."""

    def __init__(
        self, cfg: WandbConfig, directory: Path, resolved_config: Mapping[str, Any], run_id: str
    ) -> None:
        """Start a W&B run, or continue the one that has ``run_id``.

        Raises PermissionError without an API key.
        """
        import wandb

        # W&B logs into the run directory. On a full disk each of its lines would print a traceback.
        logging.raiseExceptions = False
        self._wandb = wandb
        self._variables = _set_absent(
            # W&B's own log of its processes, to which its folder in the run's directory has a link.
            WANDB_CACHE_DIR=tempfile.gettempdir(),
            # Data that uploads of an offline run need besides its files.
            WANDB_DATA_DIR=str(directory / "wandb"),
        )
        if cfg.mode is WandbMode.online and not wandb.login(prompt=False):
            raise PermissionError(
                "no API key for logger.wandb.mode=online; run `wandb login` once, or set mode=offline"
            )
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_stats=not cfg.system_metrics,
            x_disable_machine_info=not cfg.system_metrics,
        )
        try:
            self._run = wandb.init(
                id=run_id,
                # Offline, the id is enough: the files join the run that they continue when they are uploaded.
                resume="allow" if cfg.mode is WandbMode.online else None,
                project=cfg.project,
                name=cfg.name or directory.name,
                entity=cfg.entity,
                group=cfg.group,
                job_type=cfg.job_type,
                tags=cfg.tags,
                notes=cfg.notes,
                dir=directory,
                mode=cfg.mode.value,
                config=dict(resolved_config),
                settings=settings,
            )
        except Exception:
            self._end_service()
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._is_open(step):
            self._run.log(dict(metrics), step=step)

    def log_answers(self, step: int, answers: Sequence[SampleAnswer]) -> None:
        """Record the answers as a table."""
        if not self._is_open(step):
            return
        columns = [field.name for field in fields(SampleAnswer)]
        rows = [[getattr(answer, name) for name in columns] for answer in answers]
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"validation/answers": table}, step=step)
        # Besides what it uploads, W&B keeps each table among the temporary files until this process ends.
        target = table._artifact_target
        if target is not None and (copy := target.artifact._tmp_dir) is not None:
            copy.cleanup()

    def _is_open(self, step: int) -> bool:
        """Return whether W&B still accepts values of this step.

        A killed process may have logged steps after the checkpoint from which this process continues.
        """
        return step >= int(self._run.step)

    def close(self) -> None:
        try:
            self._run.finish()
        finally:
            self._end_service()
            self._keep_linked_logs()

    def _keep_linked_logs(self) -> None:
        """Put copies in the place of links in this run's logs: temporary files end with this process."""
        for link in Path(self._run.dir).parent.glob("logs/*"):
            if link.is_symlink() and link.is_file():
                content = link.read_bytes()
                link.unlink()
                link.write_bytes(content)

    def _end_service(self) -> None:
        """Stop W&B's own process, which makes it write everything to disk.

        Raises OSError when that process is gone already. Without this call, W&B would notice at the exit of
        this process and print a traceback.
        """
        try:
            self._wandb.teardown()
        finally:
            for name in self._variables:
                os.environ.pop(name, None)


def _set_absent(**variables: str) -> list[str]:
    """Set the given environment variables that are not set yet, and return their names."""
    absent = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in absent})
    return absent


def _problems(at: str, wandb: WandbConfig) -> Iterator[Problem]:
    if wandb.mode is WandbMode.online and not _has_key():
        yield Problem(
            key=f"{at}.mode=online",
            rule="needs an API key, and neither WANDB_API_KEY nor a netrc file has one",
            remedy=f"run `wandb login`, set WANDB_API_KEY, or use {at}.mode=offline",
        )
    found = sorted(set(wandb.project) & set(_FORBIDDEN))
    if found or not 1 <= len(wandb.project) <= _MAX_NAME:
        yield Problem(
            key=f"{at}.project={wandb.project}",
            rule=f"must have 1 to {_MAX_NAME} characters and none of {' '.join(_FORBIDDEN)}",
            remedy=f"whose project it is says {at}.entity" if "/" in found else "",
        )
    for index, tag in enumerate(wandb.tags):
        if not 1 <= len(tag) <= _MAX_TAG:
            yield Problem(
                key=f"{at}.tags[{index}]={tag}",
                rule=f"must have 1 to {_MAX_TAG} characters",
                remedy=f"longer texts belong in {at}.notes",
            )
    for name in ("group", "job_type"):
        value = getattr(wandb, name)
        if value is not None and not 1 <= len(value) <= _MAX_NAME:
            rule = f"must have 1 to {_MAX_NAME} characters"
            yield Problem(key=f"{at}.{name}={value}", rule=rule, remedy="null leaves it out")


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return path.is_file() and netrc.netrc(str(path)).authenticators(host) is not None
    except netrc.NetrcParseError:
        return False


def _results(wandb: WandbConfig, run: LoggedRun) -> dict[str, str]:
    path = run.directory.wandb_path
    if wandb.mode is WandbMode.offline:
        how = f"upload: wandb sync {quote(str(path))}/offline-run-*"
    else:
        how = f"run {run.run_id} of {wandb.project}"
    return {"W&B files": f"{path} ({how})"}


KIND = LoggerKind(
    about="Weights & Biases",
    label="W&B",
    options=WandbConfig,
    start=lambda wandb, run: WandbRecorder(wandb, run.directory.path, run.resolved_config, run.run_id),
    is_on=lambda wandb: wandb.mode is not WandbMode.disabled,
    position=1,
    problems=_problems,
    continues=True,
    give_up=end_processes,
    results=_results,
    names_in_sweep=lambda sweep, job: {"group": sweep, "name": f"{sweep}-{job}"},
)
