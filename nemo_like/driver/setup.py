"""Puts the concrete parts of a run together, hands them to a driver, and ends every process afterwards.

This is the only module that knows all parts; ``processes`` starts each process with its arguments. The
driver's own process imports nothing that only other processes need, such as torch or vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from nemo_like.batch.columns import Column, ColumnError, gather_columns
from nemo_like.checkpoint.options import CheckpointingConfig
from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster, OnWait
from nemo_like.cluster.options import Placement, deadline_s
from nemo_like.cluster.runtime import ray_runtime
from nemo_like.cluster.stage import EngineHolds, Stage
from nemo_like.configuration import Config
from nemo_like.data.interface import SourceReport
from nemo_like.data.sampler import MixtureSampler
from nemo_like.data_plane.partition_control import ObservedPartitionControl, PartitionControl
from nemo_like.driver.bundles import bundles
from nemo_like.driver.canary import Canary
from nemo_like.driver.checkpoints import RunCheckpoints, SavedGroups, continuation, saved_groups
from nemo_like.driver.data_identity import training_digests
from nemo_like.driver.evaluation import EvaluationComponents, EvaluationDriver
from nemo_like.driver.generate_only import GenerationComponents, GenerationDriver
from nemo_like.driver.mismatch_finder import MismatchFinder
from nemo_like.driver.observation import StepObservation
from nemo_like.driver.options import EvaluationConfig
from nemo_like.driver.processes import Actors, Starter, ray_needs, write_process_ids
from nemo_like.driver.recovery import ActorRecovery, Recoverable
from nemo_like.driver.reward_watch import RewardWatch
from nemo_like.driver.rollout_schedule import RolloutSchedule
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.run_journal import RunJournal, Stretch
from nemo_like.driver.start_status import StartStatus
from nemo_like.driver.step_checks import RunFacts, StepTripwires
from nemo_like.driver.stopping import StopRequests
from nemo_like.driver.sync_grpo import Components, SyncGRPODriver
from nemo_like.driver.validation import ValidationSet, validation_sets
from nemo_like.environments.interface import EnvironmentCheckFailed
from nemo_like.generation.interface import EngineJournal
from nemo_like.models.model_info import read_model_info
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.plan.derived import keeps_weights_asleep, shares_gpus
from nemo_like.plan.host_memory import host_memory_problems
from nemo_like.plan.memory_timetable import memory_problems
from nemo_like.plan.places import placement, weight_replicas
from nemo_like.plan.roles import Role, roles
from nemo_like.plan.run_length import too_many_steps
from nemo_like.plan.run_models import run_models
from nemo_like.policy.groups.group import PolicyWorkerGroup, TeacherWorkerGroup, ValueWorkerGroup, WorkerGroup
from nemo_like.policy.options import Device
from nemo_like.rollout.options import JOURNAL_FOLDER
from nemo_like.rollout.prompts import RolloutMode, RolloutParts, SourceReports
from nemo_like.rollout.rollout_handle import RolloutHandle
from nemo_like.tripwires.canary_checks import canary_tokens
from nemo_like.tripwires.options import Tripwires
from nemo_like.weight_sync.sync import EngineWeights, NoEngines, SharedGpus


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run whose processes are all up: its driver, and its policy workers."""

    driver: SyncGRPODriver | GenerationDriver | EvaluationDriver
    policy: PolicyWorkerGroup | None  # None in a run without training


@dataclass(frozen=True, slots=True)
class _Started:
    """Processes that are up but not connected yet, the run's directory, and the rollout actor's report on
    data and columns."""

    directory: RunDirectory
    cluster: Cluster
    starter: Starter
    actors: Actors
    rollout: RolloutParts


@contextmanager
def started(
    cfg: Config,
    directory: RunDirectory,
    logger: RunLogger,
    checkpoints: RunCheckpoints,
    stop_requests: StopRequests,
) -> Iterator[StartedRun]:
    """Start every process of the run, and yield the run once it is ready; end all processes when the block is
    left."""
    logger.status("starting Ray")
    places = placement(cfg)
    needs = ray_needs(cfg, places, directory)

    def last_words(reason: str) -> None:
        logger.last_words(f"failed: {reason}{continuation(cfg, directory)}")

    with ray_runtime(needs, logger.warn, last_words) as ray_failure:
        cluster = Cluster(directory.logs_path, ray_failure)
        try:
            if reserved := bundles(cfg, places):  # there are none where a server answers
                cluster.reserve(reserved, timeout_s=cfg.cluster.start_timeout_s)
            check_memory(cfg, cluster.smallest_gpu_bytes(), cluster.smallest_host_bytes())
            on_wait = StartStatus(logger).show
            starter = Starter(cfg, cluster, directory, places, on_wait)
            logger.status("starting " + _what_starts(cfg))
            actors = starter.all()
            rollout = _wait_until_ready(cluster, actors, cfg.cluster.start_timeout_s, on_wait)
            logger.refresh_status("connecting the processes")
            _report_sources(rollout.sources, logger)
            write_process_ids(cluster, actors, directory)
            processes = _Started(directory, cluster, starter, actors, rollout)
            yield _ready_run(cfg, processes, logger, checkpoints, stop_requests)
        finally:
            cluster.stop()


def _ready_run(
    cfg: Config,
    started: _Started,
    logger: RunLogger,
    checkpoints: RunCheckpoints,
    stop_requests: StopRequests,
) -> StartedRun:
    """Connect the processes, restore the run's position, and build its driver."""
    sides = _driver_sides(cfg, started, logger, checkpoints.is_due)
    parts, sources = sides.parts, started.rollout.sources
    recovery = ActorRecovery(cfg.cluster, parts)
    sets = validation_sets(sources[RolloutMode.validation], cfg.grpo.max_val_samples)
    if cfg.evaluation is not None:
        return StartedRun(_evaluation_driver(cfg, cfg.evaluation, parts, recovery, sets), None)
    if parts.policy is None:
        return StartedRun(_generation_driver(cfg, parts, recovery, stop_requests), None)
    components = Components(
        partitions=parts.partitions,
        rollout=parts.rollout,
        policy=parts.policy,
        value=sides.value,
        teacher=sides.teacher,
        weight_sync=parts.weight_sync,
        schedule=parts.schedule,
        validation_sets=sets,
        logger=logger,
        observer=parts.observation,
        checkpoints=checkpoints,
        stop_requests=stop_requests,
        recovery=recovery,
        tripwires=_tripwires(cfg, parts, parts.policy),
    )
    groups = saved_groups(parts.policy, sides.value)
    _verify(cfg.checkpointing, checkpoints, groups, sources, logger)
    return StartedRun(SyncGRPODriver(cfg, components), parts.policy)


@dataclass(frozen=True, slots=True)
class _DriverSides:
    """The driver's handles of all processes."""

    parts: Recoverable
    value: ValueWorkerGroup | None
    teacher: TeacherWorkerGroup | None


def _driver_sides(
    cfg: Config, started: _Started, logger: RunLogger, settles_after: Callable[[int], bool]
) -> _DriverSides:
    """Build the driver's handle of each process. ``settles_after`` is as in ``RolloutSchedule``."""
    cluster, actors, sources = started.cluster, started.actors, started.rollout.sources
    policy = _policy(cfg, cluster, actors, logger)
    value, teacher = (None, None) if policy is None else _others(cfg, cluster, actors)
    groups: list[WorkerGroup] = [group for group in (policy, value, teacher) if group is not None]
    rollout = _rollout_handle(cfg, started, logger)
    partitions = _partitions(cfg, cluster, actors, _columns(started.rollout, groups))
    weight_sync = _weight_sync(cfg, cluster, actors, policy)
    schedule = RolloutSchedule(
        cfg,
        partitions=partitions,
        rollout=rollout,
        weight_sync=weight_sync,
        sampler=_train_sampler(cfg, sources[RolloutMode.training]),
        journal=_journal(cfg, started, logger),
        settles_after=settles_after,
        canary=None if policy is None else _canary(cfg, cluster, actors, policy),
    )
    parts = Recoverable(
        cluster=cluster,
        starter=started.starter,
        actors=actors,
        rollout=rollout,
        partitions=partitions,
        policy=policy,
        groups=groups,
        weight_sync=weight_sync,
        schedule=schedule,
        observation=_observer(cfg, started),
        sources=sources,
        logger=logger,
        directory=started.directory,
    )
    return _DriverSides(parts, value, teacher)


def _rollout_handle(cfg: Config, started: _Started, logger: RunLogger) -> RolloutHandle:
    """Build the driver's handle of the rollout actor, which watches the rewards."""
    actor = started.actors.rollout
    watch = RewardWatch(cfg.env, logger, started.directory.log_path(actor.name))
    deadlines = partial(deadline_s, cfg.cluster)
    return RolloutHandle(started.cluster, actor, deadline_s=deadlines, inspect=watch.check)


def _evaluation_driver(
    cfg: Config,
    evaluation: EvaluationConfig,
    parts: Recoverable,
    recovery: ActorRecovery,
    sets: tuple[ValidationSet, ...],
) -> EvaluationDriver:
    """Build the driver of a run that only evaluates."""
    components = EvaluationComponents(
        partitions=parts.partitions,
        rollout=parts.rollout,
        validation_sets=sets,
        logger=parts.logger,
        directory=parts.directory,
        recovery=recovery,
    )
    return EvaluationDriver(cfg, evaluation, components)


def _generation_driver(
    cfg: Config, parts: Recoverable, recovery: ActorRecovery, stop_requests: StopRequests
) -> GenerationDriver:
    """Build the driver of a run that trains nothing."""
    components = GenerationComponents(
        partitions=parts.partitions,
        rollout=parts.rollout,
        schedule=parts.schedule,
        logger=parts.logger,
        observer=parts.observation,
        recovery=recovery,
        stop_requests=stop_requests,
    )
    return GenerationDriver(cfg, components)


def _observer(cfg: Config, started: _Started) -> StepObservation:
    """Build the observer of steps, and have the processes mark their ranges for profilers."""
    actors, gpu_actors = started.actors, partial(_gpu_actors, cfg, started.actors)
    observer = StepObservation(cfg.logger, started.cluster, actors.all, started.directory, gpu_actors)
    observer.mark_ranges([*actors.engines, *actors.workers])
    return observer


def _journal(cfg: Config, started: _Started, logger: RunLogger) -> RunJournal:
    """Build the run's journal; the engines write their own files of it."""
    open_engines = partial(_open_journals, cfg, started.cluster, started.actors)
    digests = training_digests(started.rollout.sources)
    return RunJournal(cfg, started.directory.path / JOURNAL_FOLDER, open_engines, logger.note, digests)


def _open_journals(cfg: Config, cluster: Cluster, actors: Actors, stretch: Stretch) -> None:
    """Have the engines write their journals, and follow the given ones, if weights come while samples are
    under way."""
    if not cfg.grpo.max_staleness:
        return
    calls = []
    for engine in actors.engines:
        name = f"{engine.name}.jsonl"
        followed = None if stretch.followed is None else str(stretch.followed / name)
        calls.append(engine.submit("open_journal", EngineJournal(str(stretch.path / name), followed)))
    timeout_s = deadline_s(cfg.cluster, Stage.generation)
    cluster.gather(calls, stage="opening the engines' journals", timeout_s=timeout_s)


def _tripwires(cfg: Config, parts: Recoverable, policy: PolicyWorkerGroup) -> StepTripwires:
    sources = parts.sources[RolloutMode.training]
    model = read_model_info(cfg.policy.model_name, cfg.policy.backend)
    facts = RunFacts(
        has_experts=bool(model.num_experts), num_prompts=sum(source.num_prompts for source in sources)
    )
    finder = None
    if cfg.debug.find_mismatch and isinstance(parts.weight_sync, EngineWeights):
        finder = MismatchFinder(
            cfg,
            parts.cluster,
            lambda: parts.actors.engines,
            policy,
            parts.weight_sync,
            parts.logger.status,
        )
    return StepTripwires(cfg, facts, parts.logger.warn, None if finder is None else finder.sentence)


def _canary(cfg: Config, cluster: Cluster, actors: Actors, policy: PolicyWorkerGroup) -> Canary | None:
    if cfg.debug.tripwires is not Tripwires.all or not actors.engines:
        return None
    model = read_model_info(cfg.policy.model_name, cfg.policy.backend)
    # An engine samples one token more.
    tokens = canary_tokens(model.vocab_size, cfg.policy.max_total_sequence_length - 1)
    return Canary(cluster, lambda: actors.engines, policy, tokens, deadline_s(cfg.cluster, Stage.weight_sync))


def _partitions(cfg: Config, cluster: Cluster, actors: Actors, columns: Sequence[Column]) -> PartitionControl:
    """Build the driver's handle of the data plane."""
    control = ObservedPartitionControl if cfg.data_plane.log_operations else PartitionControl
    return control(
        cluster,
        actors.host,
        columns=columns,
        # Dynamic sampling drops groups, so it is unknown at the put which replica will get which sample.
        num_readers=None if cfg.grpo.use_dynamic_sampling else cfg.policy.data_parallel_size,
        timeout_s=cfg.data_plane.timeout_s,
    )


def _train_sampler(cfg: Config, sources: Sequence[SourceReport]) -> MixtureSampler:
    """Build the sampler that draws the prompts of each training step."""
    sizes = [source.num_prompts for source in sources]
    if (problem := too_many_steps(cfg, sizes)) is not None:
        raise RunFailed(problem)
    return MixtureSampler(sizes, _weights(cfg), seed=cfg.grpo.seed, shuffle=cfg.data.shuffle)


def _columns(rollout: RolloutParts, groups: Sequence[WorkerGroup]) -> tuple[Column, ...]:
    """Return all columns of the run. Raises RunFailed when its parts declare them differently."""
    declarations = [*rollout.declarations, *(one for group in groups for one in group.declarations())]
    try:
        return gather_columns(declarations)
    except ColumnError as error:
        raise RunFailed(str(error)) from error


def _verify(
    cfg: CheckpointingConfig,
    checkpoints: RunCheckpoints,
    groups: SavedGroups,
    sources: SourceReports,
    logger: RunLogger,
) -> None:
    """Have the workers check the checkpoint to continue from, and go back to an earlier one when it is
    corrupt.

    Then compare its data with the run's. Log the warnings, and continue the log after the step of the chosen
    checkpoint.
    """
    expected = checkpoints.last_step
    checkpoints.verify(groups)
    checkpoints.meet_data(sources)
    for warning in checkpoints.warnings:
        logger.warn(warning)
    if checkpoints.last_step != expected:
        logger.continue_after(checkpoints.last_step)
    if checkpoints.found is not None:
        logger.status(f"continuing after step {checkpoints.last_step}")
    if checkpoints.begun_with is not None:
        logger.note(f"the run takes of {checkpoints.begun_with.path} {cfg.resume_parts.about}")


def _gpu_actors(cfg: Config, actors: Actors) -> list[ActorHandle]:
    """Return processes that have all GPUs between them, each GPU once."""
    if cfg.policy.device is Device.cpu:
        return []
    is_colocated = cfg.cluster.placement is Placement.colocated
    workers = actors.groups[Role.policy_worker] if is_colocated else actors.workers
    return workers if shares_gpus(cfg) else [*workers, *actors.engines]


def _weights(cfg: Config) -> list[float]:
    """Return the weights of the training sources; a replay always has one source."""
    return [1.0] if cfg.rollout.replay is not None else [source.weight for source in cfg.data.train]


def _report_sources(sources: SourceReports, logger: RunLogger) -> None:
    """Log how many prompts each source has, if some were too long or several sources are mixed."""
    for mode, reports in sources.items():
        for report in reports:
            if report.num_too_long or len(reports) > 1:
                section = "train" if mode is RolloutMode.training else "validation"
                logger.note(
                    f"data.{section} {report.name}: {report.num_prompts} problems, "
                    f"{report.num_too_long} too long"
                )


def _what_starts(cfg: Config) -> str:
    needs = roles(cfg)
    parts = {
        "vLLM engines": Role.engine,
        "the server's client": Role.endpoint,
        "policy workers": Role.policy_worker,
        "value workers": Role.value_worker,
        "teacher workers": Role.teacher_worker,
    }
    started = (name for name, role in parts.items() if role in needs and needs[role].count)
    return " and ".join(["the data plane", *started])


def check_memory(cfg: Config, gpu_bytes: int | None, host_bytes: int | None) -> None:
    """Raise RunFailed when the processes need more memory than the smallest reserved GPU or node has.

    A size of None, for an unknown size or a run without GPUs, passes.
    """
    if gpu_bytes is not None and (problems := list(memory_problems(cfg, run_models(cfg), gpu_bytes))):
        raise RunFailed(f"the GPUs are too small: {'; '.join(str(problem) for problem in problems)}")
    if host_bytes is not None and (problems := list(host_memory_problems(cfg, run_models(cfg), host_bytes))):
        raise RunFailed(f"the nodes' memory is too small: {'; '.join(str(problem) for problem in problems)}")


def _wait_until_ready(cluster: Cluster, actors: Actors, timeout_s: float, on_wait: OnWait) -> RolloutParts:
    """Wait until every process is up and every environment can judge; return the rollout actor's report.

    Raises RunFailed when an environment cannot judge.
    """
    calls = actors.readiness(actors.all())  # the rollout actor's is the first
    if actors.environments:
        calls.append(actors.rollout.submit("check_environments"))
    try:
        rollout, *_ = cluster.gather(calls, stage="start", timeout_s=timeout_s, on_wait=on_wait)
    except ActorFailed as error:
        if isinstance(error.cause, EnvironmentCheckFailed):
            raise RunFailed(str(error.cause)) from error
        raise
    cluster.watch(actors.host, actors.host.submit("storage_failure"))
    return rollout


def _policy(cfg: Config, cluster: Cluster, actors: Actors, logger: RunLogger) -> PolicyWorkerGroup | None:
    """Build the driver's handle of the policy workers, and connect them with the engines if there are any.

    None in a run that only generates.
    """
    if cfg.rollout.generate_only:
        return None
    policy = PolicyWorkerGroup(
        actors.groups[Role.policy_worker],
        cluster,
        cfg.policy,
        num_epochs=cfg.grpo.num_epochs_per_rollout,
        deadline_s=partial(deadline_s, cfg.cluster),
        weight_replicas=weight_replicas(cfg, placement(cfg)),
    )
    if actors.engines:
        logger.status("connecting policy workers and engines")
        policy.connect_weights(actors.engines)
    return policy


def _others(
    cfg: Config, cluster: Cluster, actors: Actors
) -> tuple[ValueWorkerGroup | None, TeacherWorkerGroup | None]:
    """Build the driver's handles of the workers of a critic and of a teacher; None where the run has none."""
    value, teacher, deadlines = None, None, partial(deadline_s, cfg.cluster)
    if cfg.value is not None:
        workers, num_epochs = actors.groups[Role.value_worker], cfg.value.num_epochs_per_rollout
        value = ValueWorkerGroup(workers, cluster, cfg.value, num_epochs=num_epochs, deadline_s=deadlines)
    if cfg.teacher is not None:
        workers = actors.groups[Role.teacher_worker]
        teacher = TeacherWorkerGroup(workers, cluster, cfg.teacher, deadline_s=deadlines)
    return value, teacher


def _weight_sync(
    cfg: Config, cluster: Cluster, actors: Actors, policy: PolicyWorkerGroup | None
) -> EngineWeights | NoEngines:
    if policy is None or not actors.engines:
        return NoEngines()

    def hold(what: EngineHolds) -> None:
        calls = [engine.submit("hold", what) for engine in actors.engines]
        timeout_s = deadline_s(cfg.cluster, Stage.weight_sync)
        cluster.gather(
            calls, stage=f"engines hold {what.value}", timeout_s=timeout_s, watching=actors.engines
        )

    shared = SharedGpus(hold, keeps_weights=keeps_weights_asleep(cfg)) if shares_gpus(cfg) else None
    return EngineWeights(policy.push_weights, shared)
