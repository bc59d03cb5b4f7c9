"""Makes one whole run, from opening its directory to reporting how it ended.

run_in ──▶ run_and_report ──▶ run_with_restarts ──▶ run_once
holds the    opens a logger,    starts all          starts the processes, makes the steps that are
directories  reports the end    processes again     left, exports the policy
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

import yaml

from nemo_like.checkpoint.store import POLICY_GROUP, VALUE_GROUP, CheckpointError
from nemo_like.cluster.actor_errors import ActorBroken, ActorDied, ClusterError, RayDied, StageTimeout
from nemo_like.cluster.janitor import swept_directory
from nemo_like.cluster.options import TimeoutAction
from nemo_like.cluster.private_ray import temporary_parent, temporary_parent_note
from nemo_like.config.loader import to_yaml
from nemo_like.configuration import Config
from nemo_like.driver import exit_codes
from nemo_like.driver.checkpoints import RunCheckpoints, kept
from nemo_like.driver.final_export import FinalExport, PolicyExport
from nemo_like.driver.held_directories import HeldDirectories
from nemo_like.driver.run_failures import RewardsFailed, RunFailed, failure_reason
from nemo_like.driver.setup import started
from nemo_like.driver.stopping import OnStep, StopRequests
from nemo_like.driver.sync_grpo import SyncGRPODriver
from nemo_like.driver.validation import reached_goal
from nemo_like.models.model_info import model_of, read_model_info
from nemo_like.observability.disk import DiskFull, full_directory, space_for
from nemo_like.observability.logger import MakeReport, RunLogger
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.software import software
from nemo_like.observability.summary import RunSummary, SampleAnswer
from nemo_like.plan.plan import checkpoint_bytes, weight_bytes


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How a run ended: ``outcome`` completes the sentence "the run ..."."""

    outcome: str
    exit_code: int
    answers: Sequence[SampleAnswer] = ()  # of the last validation
    error: Exception | None = None  # because of which the run failed


def run_directory(cfg: Config, config_name: str) -> RunDirectory:
    """Create the run directory, or open the directory of the run to continue.

    ``config_name``, with date and time, names it unless logger.run_name does. Raises RunFailed when it cannot
    be written.
    """
    name = cfg.logger.run_name or f"{config_name}-{datetime.now():%Y%m%d-%H%M%S}"
    is_continued = cfg.checkpointing.enabled and cfg.checkpointing.resume_if_exists and cfg.logger.run_name
    with _writable(cfg):
        return (RunDirectory.open if is_continued else RunDirectory.create)(cfg.logger.log_dir, name)


def run_in(
    directory: RunDirectory,
    cfg: Config,
    on_step: OnStep | None = None,
    report: MakeReport | None = None,
) -> RunEnd:
    """Make one whole run in a directory, and return how it ended, also when it failed or was interrupted.

    ``on_step`` is called after every step; see ``StopRequests.after_step``. ``report`` makes the writer of
    the run's report. Only the main thread may call this. Raises DirectoryInUse when another run holds the
    directory, and RunFailed when it cannot be written, or has checkpoints but no complete one.
    """
    with _writable(cfg):
        held = HeldDirectories(_written_directories(cfg, directory))
    replaced = temporary_parent_note()
    try:
        with swept_directory(temporary_parent()):
            stop_requests = StopRequests(cfg.checkpointing, on_step)
            return _run_and_report(directory, cfg, held, stop_requests, report, replaced)
    except (CheckpointError, DiskFull, OSError) as error:  # before there is a logger to tell it
        raise RunFailed(f"the run cannot be started: {failure_reason(error, directory.path)}") from error
    finally:
        held.release()


@contextmanager
def _writable(cfg: Config) -> Iterator[None]:
    """Raise RunFailed when the block cannot write the run directory."""
    try:
        with space_for("the run directory", Path(cfg.logger.log_dir).absolute()):
            yield
    except (DiskFull, OSError) as error:
        raise RunFailed(f"the run directory cannot be written: {error}") from error


def _run_and_report(
    directory: RunDirectory,
    cfg: Config,
    held: HeldDirectories,
    stop_requests: StopRequests,
    report: MakeReport | None,
    warning: str | None,
) -> RunEnd:
    """Make the run in a directory that this process holds, log ``warning`` first, and return how the run
    ended."""
    resolved = to_yaml(cfg)
    directory.write_config(resolved)
    directory.write_software(software())
    checkpoints = run_checkpoints(cfg, directory)
    logger = RunLogger(
        cfg.logger,
        directory,
        resolved_config=yaml.safe_load(resolved),
        max_num_steps=cfg.grpo.max_num_steps if cfg.evaluation is None else 0,
        wandb_run_id=checkpoints.wandb_run_id,
        report=report,
    )
    with logger, held.renewing(logger.warn):
        if warning is not None:
            logger.warn(warning)
        try:
            end = _run_with_restarts(cfg, directory, logger, checkpoints, stop_requests)
        except KeyboardInterrupt:
            end = RunEnd(f"was interrupted{_saved(cfg, directory)}", exit_codes.INTERRUPTED)
        except RewardsFailed as error:
            end = RunEnd(f"failed: {error}", exit_codes.REWARDS_FAILED, error=error)
        except (ClusterError, RunFailed, CheckpointError, DiskFull, OSError) as error:
            reason = failure_reason(error, *_filled_directories(cfg, directory))
            end = RunEnd(f"failed: {reason}", exit_codes.FAILED, error=error)
        if held.lost is not None:
            outcome = f"was stopped, and wrote no results: {held.lost}"
            logger.abandon(f"The run {outcome}.")
            return RunEnd(outcome, exit_codes.FAILED)
        elsewhere = cfg.checkpointing.checkpoint_dir
        paths = {} if elsewhere is None else {"checkpoints": str(Path(elsewhere).absolute())}
        summary = RunSummary(
            outcome=end.outcome, exit_code=end.exit_code, sample_answers=end.answers, paths=paths
        )
        is_complete = logger.finish(summary)
    if end.exit_code == exit_codes.FINISHED and not is_complete:
        return replace(
            end,
            outcome=f"{end.outcome}, but not all of its results could be written",
            exit_code=exit_codes.FAILED,
        )
    return end


def _run_with_restarts(
    cfg: Config,
    directory: RunDirectory,
    logger: RunLogger,
    checkpoints: RunCheckpoints,
    stop_requests: StopRequests,
) -> RunEnd:
    """Make the run; when a process dies or hangs, start all processes again from the latest checkpoint.

    Raises the error without a restart when ``_is_final`` says so, or when ``cluster.max_restarts`` are used
    up.
    """
    num_restarts, broken = 0, None
    while True:
        for warning in checkpoints.warnings:
            logger.warn(warning)
        logger.continue_after(checkpoints.last_step)
        try:
            return _run_once(cfg, directory, logger, checkpoints, stop_requests)
        except (ActorDied, RayDied, StageTimeout) as error:
            if _is_final(error, cfg, directory) or num_restarts == cfg.cluster.max_restarts:
                raise
            latest = run_checkpoints(cfg, directory)
            if isinstance(error, ActorBroken):
                if broken == (error.kind, latest.last_step):
                    logger.warn(f"{error.kind} came again after all processes were started again")
                    raise
                broken = error.kind, latest.last_step
            num_restarts += 1
            logger.warn(
                f"{error}\nstarting all processes again (restart {num_restarts} of "
                f"{cfg.cluster.max_restarts})"
            )
        checkpoints = latest


def _is_final(error: ClusterError, cfg: Config, directory: RunDirectory) -> bool:
    """Return whether no restart shall follow: without checkpoints, after a stage's timeout with
    ``cluster.on_stage_timeout=stop``, and when the disk is full, so that a new start would fail too."""
    shall_stop = isinstance(error, StageTimeout) and cfg.cluster.on_stage_timeout is TimeoutAction.stop
    is_full = full_directory(error, *_filled_directories(cfg, directory)) is not None
    return shall_stop or not cfg.checkpointing.enabled or is_full


def run_checkpoints(cfg: Config, directory: RunDirectory) -> RunCheckpoints:
    """Look for the checkpoints in a run directory.

    Raises CheckpointError when there are checkpoints, and none is complete.
    """
    groups, num_bytes = [POLICY_GROUP], checkpoint_bytes(cfg.policy, model_of(cfg.policy))
    if cfg.value is not None:
        groups.append(VALUE_GROUP)
        num_bytes += checkpoint_bytes(cfg.value, model_of(cfg.value))
    export = None
    if cfg.checkpointing.export_hf:
        num_bytes += _export_bytes(cfg)
        export = _policy_export(cfg)
    return RunCheckpoints(cfg.checkpointing, directory, num_bytes, groups, export)


def _run_once(
    cfg: Config,
    directory: RunDirectory,
    logger: RunLogger,
    checkpoints: RunCheckpoints,
    stop_requests: StopRequests,
) -> RunEnd:
    """Start the processes, make the steps that are left, and export the policy if that is configured.

    A run that a signal or a deadline stops has no time for an export.
    """
    export = _final_export(cfg, directory)
    is_finished = _is_finished(cfg, checkpoints)
    if is_finished and (export is None or export.step == checkpoints.last_step):
        limits = "grpo.max_num_steps" if cfg.grpo.max_num_epochs is None else "grpo.max_num_epochs, its steps"
        return RunEnd(f"had finished already; raise {limits} or its goal to train on", 0)
    with started(cfg, directory, logger, checkpoints, stop_requests) as parts:
        driver = parts.driver
        reason = None if is_finished else driver.run()
        if isinstance(driver, SyncGRPODriver):
            step = driver.position.step
            if reason is not None and reason != stop_requests.by_callback:
                outcome = f"was stopped: {reason}{kept(cfg, directory, step)}"
                return RunEnd(outcome, exit_codes.PREEMPTED)
            if export is not None and parts.policy is not None:
                logger.status("exporting the policy")
                export.write(parts.policy.export_hf, step)
        logger.status("stopping")
    outcome = "finished" if reason is None else f"was stopped: {reason}"
    return RunEnd(outcome, exit_codes.FINISHED, driver.sample_answers)


def _saved(cfg: Config, directory: RunDirectory) -> str:
    """Return which step of an interrupted run is saved, and how it continues; empty where no run would look
    for a checkpoint of it."""
    if cfg.evaluation is not None or cfg.rollout.generate_only:
        return ""
    if not cfg.checkpointing.enabled:
        return ". With checkpointing.enabled=false nothing is saved"
    if not cfg.checkpointing.resume_if_exists:
        return ""
    try:
        last_step = run_checkpoints(cfg, directory).last_step
    except (CheckpointError, OSError):
        return ""
    return kept(cfg, directory, last_step) if last_step >= 0 else ". No step was saved yet"


def _final_export(cfg: Config, directory: RunDirectory) -> FinalExport | None:
    if not cfg.checkpointing.export_final_hf:
        return None
    return FinalExport(directory, _export_bytes(cfg), _policy_export(cfg))


def _export_bytes(cfg: Config) -> int:
    return weight_bytes(cfg, read_model_info(cfg.policy.model_name, cfg.policy.backend))


def _policy_export(cfg: Config) -> PolicyExport:
    template = cfg.data.chat_template
    return PolicyExport(None if template is None else Path(template))


def _is_finished(cfg: Config, checkpoints: RunCheckpoints) -> bool:
    """Return whether an earlier process of this run made the last step or reached the goal."""
    if checkpoints.found is None:
        return False
    state = checkpoints.found.state
    return state.step >= cfg.grpo.max_num_steps or reached_goal(state.metrics, cfg.grpo)


def _written_directories(cfg: Config, directory: RunDirectory) -> list[Path]:
    """Return every directory that only this run may write."""
    elsewhere = cfg.checkpointing.checkpoint_dir if cfg.checkpointing.enabled else None
    return [directory.path, *([] if elsewhere is None else [Path(elsewhere).absolute()])]


def _filled_directories(cfg: Config, directory: RunDirectory) -> list[Path]:
    """Return every directory to which processes of this run write."""
    return [*_written_directories(cfg, directory), Path(temporary_parent())]
