"""Puts the concrete parts together, runs the driver, and ends every process again.

The only module that knows all parts; ``processes`` says what each process is started with. The driver's
own imports none of what they need.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from types import FrameType

import yaml

from nemo_like.checkpoint.store import CheckpointError
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.errors import ActorDied, ClusterError, StageTimeout
from nemo_like.cluster.runtime import ray_runtime
from nemo_like.config.deadlines import deadline_s
from nemo_like.config.loader import to_yaml
from nemo_like.config.placement_rules import shares_gpus
from nemo_like.config.plan import ray_cpus, ray_gpus
from nemo_like.config.schema import Config, TimeoutAction
from nemo_like.data.sampler import MixtureSampler
from nemo_like.data_plane.columns import POLICY_COLUMNS, ROLLOUT_COLUMNS
from nemo_like.data_plane.handle import ObservedPartitionControl, PartitionControl
from nemo_like.driver.bundles import bundles
from nemo_like.driver.checkpoints import RunCheckpoints
from nemo_like.driver.errors import RunFailed
from nemo_like.driver.generate_only import GenerationComponents, GenerationDriver
from nemo_like.driver.observation import StepObservation
from nemo_like.driver.processes import Actors, Starter, write_process_ids
from nemo_like.driver.recovery import ActorRecovery, Recoverable
from nemo_like.driver.stopping import EXIT_PREEMPTED, StopRequests
from nemo_like.driver.sync_grpo import Components, SyncGRPODriver
from nemo_like.driver.validation import reached_goal, validation_sets
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.summary import RunSummary, SampleAnswer
from nemo_like.policy.group import PolicyWorkerGroup
from nemo_like.policy.layout import parallel_layout
from nemo_like.rollout.handle import RolloutHandle
from nemo_like.rollout.prompts import RolloutMode, SourceReports
from nemo_like.weight_sync.sync import NoEngines, WeightSync

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def run(cfg: Config, config_name: str) -> int:
    """One whole run; the exit code. ``config_name`` names the run directory unless logger.run_name does."""
    directory = _run_directory(cfg, config_name)
    resolved = to_yaml(cfg)
    directory.write_config(resolved)
    checkpoints = RunCheckpoints(cfg.checkpointing, directory)
    logger = RunLogger(
        cfg.logger,
        directory,
        resolved_config=yaml.safe_load(resolved),
        max_num_steps=cfg.grpo.max_num_steps,
        wandb_run_id=checkpoints.wandb_run_id,
    )
    with logger:
        result = _run_with_restarts(cfg, directory, logger, checkpoints)
        logger.finish(RunSummary(outcome=result.outcome, sample_answers=result.answers))
    return result.exit_code


@dataclass(frozen=True, slots=True)
class _Result:
    outcome: str
    exit_code: int
    answers: Sequence[SampleAnswer] = ()


def _run_with_restarts(
    cfg: Config, directory: RunDirectory, logger: RunLogger, checkpoints: RunCheckpoints
) -> _Result:
    """The run; after a process died or hung, all of them again, from the latest checkpoint."""
    num_restarts = 0
    while True:
        for warning in checkpoints.warnings:
            logger.warn(warning)
        logger.continue_after(checkpoints.last_step)
        try:
            return _run(cfg, directory, logger, checkpoints)
        except KeyboardInterrupt:
            return _Result("was interrupted", EXIT_INTERRUPTED)
        except (ActorDied, StageTimeout) as error:
            shall_stop = (
                isinstance(error, StageTimeout) and cfg.cluster.on_stage_timeout is TimeoutAction.stop
            )
            if shall_stop or not cfg.checkpointing.enabled or num_restarts == cfg.cluster.max_restarts:
                return _Result(f"failed: {error}", EXIT_FAILED)
            num_restarts += 1
            logger.warn(
                f"{error}\nstarting all processes again (restart {num_restarts} of "
                f"{cfg.cluster.max_restarts})"
            )
            checkpoints = RunCheckpoints(cfg.checkpointing, directory)
        except (ClusterError, RunFailed, CheckpointError, OSError) as error:
            return _Result(f"failed: {error}", EXIT_FAILED)


def _run(cfg: Config, directory: RunDirectory, logger: RunLogger, checkpoints: RunCheckpoints) -> _Result:
    """The steps that are left."""
    if _is_finished(cfg, checkpoints):
        return _Result("had finished already; raise grpo.max_num_steps or its goal to train on", 0)
    with started(cfg, directory, logger, checkpoints) as parts:
        if reason := parts.driver.run():
            return _Result(f"was stopped: {reason}. The same command continues it", EXIT_PREEMPTED)
        if parts.policy is not None and cfg.checkpointing.export_final_hf:
            logger.status("exporting the policy")
            parts.policy.export_hf(str(directory.path / "final_hf"))
        logger.status("stopping")
    return _Result("finished", 0, parts.driver.sample_answers)


def _is_finished(cfg: Config, checkpoints: RunCheckpoints) -> bool:
    """Whether an earlier process made the last step, or reached the goal."""
    if checkpoints.found is None:
        return False
    state = checkpoints.found.state
    return state.step >= cfg.grpo.max_num_steps or reached_goal(state.metrics, cfg.grpo)


def _run_directory(cfg: Config, config_name: str) -> RunDirectory:
    """A new one, or that of the run that is continued."""
    name = cfg.logger.run_name or f"{config_name}-{datetime.now():%Y%m%d-%H%M%S}"
    if cfg.checkpointing.enabled and cfg.checkpointing.resume_if_exists and cfg.logger.run_name:
        earlier = RunDirectory.reopen(cfg.logger.log_dir, name)
        if earlier is not None:
            return earlier
    return RunDirectory.create(cfg.logger.log_dir, name)


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run whose processes are all up."""

    driver: SyncGRPODriver | GenerationDriver
    policy: PolicyWorkerGroup | None  # none where nothing is trained


@dataclass(frozen=True, slots=True)
class _Started:
    """Processes that are up, where they write, and what data the rollout actor found."""

    directory: RunDirectory
    cluster: Cluster
    starter: Starter
    actors: Actors
    sources: SourceReports


@contextmanager
def started(
    cfg: Config, directory: RunDirectory, logger: RunLogger, checkpoints: RunCheckpoints
) -> Iterator[StartedRun]:
    """Every process of the run, ready; all of them are gone when the block is left."""
    cluster = Cluster(report_directory=directory.logs_path)
    logger.status("starting Ray")
    num_cpus = ray_cpus(cfg) if cfg.cluster.num_cpus is None else cfg.cluster.num_cpus
    num_gpus = max(ray_gpus(cfg), cfg.cluster.num_gpus)
    with (
        ray_runtime(cfg.cluster.address, num_cpus=num_cpus, num_gpus=num_gpus),
        _sigterm_as_interrupt(),  # after Ray, which installs a handler of its own
    ):
        try:
            cluster.reserve(bundles(cfg), timeout_s=cfg.cluster.start_timeout_s)
            starter = Starter(cfg, cluster, directory)
            actors = starter.all()
            logger.status("starting " + _what_starts(actors))
            sources = _wait_until_ready(cluster, actors, cfg.cluster.start_timeout_s)
            _report_sources(sources, logger)
            write_process_ids(cluster, actors, directory)
            processes = _Started(directory, cluster, starter, actors, sources)
            yield _connect(cfg, processes, logger, checkpoints)
        finally:
            cluster.stop()


def _connect(cfg: Config, started: _Started, logger: RunLogger, checkpoints: RunCheckpoints) -> StartedRun:
    """Let the processes meet, bring them to where the run stands, and hand them to a driver."""
    cluster, actors, sources = started.cluster, started.actors, started.sources
    rollout = RolloutHandle(cluster, actors.rollout, deadline_s=partial(deadline_s, cfg.cluster))
    control = ObservedPartitionControl if cfg.data_plane.log_operations else PartitionControl
    partitions = control(
        cluster,
        actors.host,
        columns=(*ROLLOUT_COLUMNS, *POLICY_COLUMNS),
        # Dynamic sampling drops groups, after which nobody knows who gets the others.
        num_readers=None if cfg.grpo.use_dynamic_sampling else cfg.policy.data_parallel_size,
        timeout_s=cfg.data_plane.timeout_s,
    )
    observer = StepObservation(cfg.logger, cluster, actors.all, started.directory)
    observer.mark_ranges([*actors.engines, *actors.workers])
    sampler = MixtureSampler(
        [source.num_prompts for source in sources[RolloutMode.training]],
        _weights(cfg),
        seed=cfg.grpo.seed,
        shuffle=cfg.data.shuffle,
    )
    policy = None if cfg.rollout.generate_only else _policy(cfg, cluster, actors, logger)
    weight_sync = _weight_sync(cfg, cluster, actors, policy)
    recoverable = Recoverable(
        cluster=cluster,
        starter=started.starter,
        actors=actors,
        rollout=rollout,
        partitions=partitions,
        policy=policy,
        weight_sync=weight_sync,
        train_sampler=sampler,
        observation=observer,
        logger=logger,
        directory=started.directory,
    )
    recovery = ActorRecovery(cfg.cluster, recoverable)
    if policy is None:
        parts = GenerationComponents(
            partitions=partitions,
            rollout=rollout,
            train_sampler=sampler,
            logger=logger,
            observer=observer,
            recovery=recovery,
        )
        return StartedRun(GenerationDriver(cfg, parts), None)
    components = Components(
        partitions=partitions,
        rollout=rollout,
        policy=policy,
        weight_sync=weight_sync,
        train_sampler=sampler,
        validation_sets=validation_sets(sources[RolloutMode.validation], cfg.grpo.max_val_samples),
        logger=logger,
        observer=observer,
        checkpoints=checkpoints,
        stop_requests=StopRequests(cfg.checkpointing),
        recovery=recovery,
    )
    if checkpoints.found is not None:
        logger.status(f"continuing after step {checkpoints.found.state.step}")
    return StartedRun(SyncGRPODriver(cfg, components), policy)


def _weights(cfg: Config) -> list[float]:
    """Of the training sources; a replay has one, whatever the recorded run had."""
    return [1.0] if cfg.rollout.replay is not None else [source.weight for source in cfg.data.train]


def _report_sources(sources: SourceReports, logger: RunLogger) -> None:
    """Say how many problems there are where some were left out or several sources are mixed."""
    for mode, reports in sources.items():
        for report in reports:
            if report.num_too_long or len(reports) > 1:
                section = "train" if mode is RolloutMode.training else "validation"
                logger.note(
                    f"data.{section} {report.name}: {report.num_prompts} problems, "
                    f"{report.num_too_long} too long"
                )


def _what_starts(actors: Actors) -> str:
    parts = {"vLLM engines": actors.engines, "policy workers": actors.workers}
    return " and ".join(["the data plane", *(name for name, handles in parts.items() if handles)])


def _wait_until_ready(cluster: Cluster, actors: Actors, timeout_s: float) -> SourceReports:
    """Returns what the datasets hold once every process is up."""
    rollout_first = actors.readiness(actors.all())
    sources, *_ = cluster.gather(rollout_first, stage="start", timeout_s=timeout_s)
    cluster.watch(actors.host, actors.host.submit("storage_failure"))
    return sources


def _policy(cfg: Config, cluster: Cluster, actors: Actors, logger: RunLogger) -> PolicyWorkerGroup:
    """The worker group, connected with the engines where there are any."""
    policy = PolicyWorkerGroup(
        actors.workers,
        cluster,
        parallel_layout(cfg.policy),
        cfg.policy,
        num_epochs=cfg.grpo.num_epochs_per_rollout,
        deadline_s=partial(deadline_s, cfg.cluster),
    )
    if actors.engines:
        logger.status("connecting policy workers and engines")
        policy.connect_weights(actors.engines)
    return policy


def _weight_sync(
    cfg: Config, cluster: Cluster, actors: Actors, policy: PolicyWorkerGroup | None
) -> WeightSync | NoEngines:
    if policy is None or not actors.engines:
        return NoEngines()

    def put_to_sleep() -> None:
        calls = [engine.submit("sleep") for engine in actors.engines]
        cluster.gather(calls, stage="sleep", timeout_s=cfg.cluster.stage_timeout_s, watching=actors.engines)

    return WeightSync(policy.push_weights, put_to_sleep if shares_gpus(cfg) else None)


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """A polite kill ends a run the way Ctrl-C does."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
