"""Recovers a run without a restart: replaces a process that died, and repeats the work under way.

work ── ActorDied ─▶ the training workers settle: are they all alive, and at the version they had?
                     the rollout under way is abandoned, the engines abort their requests
                     dead processes are started again and connected with the others
work again ◀──────── the prompt order goes back to where the work began; engines get the weights anew, and
                     rollouts that were ahead begin again

Every response has a seed of its own, so the work gives the second time what it would have given the first.
A training worker holds weights and optimizer state that no other process has: its death is not recovered
here. A process that raises an error after which it is of no more use counts as dead (``cluster.breakdown``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from nemo_like.cluster.actor_errors import ActorBroken, ActorDied, ActorFailed
from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.breakdown import CODE_ERRORS, in_short, is_own
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.options import ClusterConfig
from nemo_like.data_plane.partition_control import PartitionControl
from nemo_like.data_plane.storage_errors import StorageFailed
from nemo_like.driver.data_identity import other_held_out_data, other_training_data, saved_data
from nemo_like.driver.observation import StepObservation
from nemo_like.driver.processes import Actors, Starter, write_process_ids
from nemo_like.driver.rollout_schedule import RolloutSchedule
from nemo_like.driver.run_failures import RunFailed
from nemo_like.observability.disk import is_disk_full
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.policy.groups.group import PolicyWorkerGroup, WorkerGroup
from nemo_like.rollout.prompts import RolloutParts, SourceReports
from nemo_like.rollout.rollout_handle import RolloutHandle
from nemo_like.weight_sync.sync import EngineWeights, NoEngines

T = TypeVar("T")

_STAGE = "recovery"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recoverable:
    """The parts of a run that a recovery connects with new processes, or takes back to where the work
    began."""

    cluster: Cluster
    starter: Starter
    actors: Actors
    rollout: RolloutHandle
    partitions: PartitionControl
    policy: PolicyWorkerGroup | None  # None in a run without training
    groups: Sequence[WorkerGroup]  # all worker groups, the policy's too
    weight_sync: EngineWeights | NoEngines
    schedule: RolloutSchedule
    observation: StepObservation
    sources: SourceReports  # reports on the data when the run started
    logger: RunLogger
    directory: RunDirectory


class ActorRecovery:
    """The ``interface.Recovery`` for engines, environments, the rollout actor and the data plane's host."""

    def __init__(self, cfg: ClusterConfig, parts: Recoverable) -> None:
        self._cfg, self._parts = cfg, parts
        self._num_recoveries = 0
        self._not_connected: set[str] = set()  # names of actors started again but not yet connected
        self._to_replace: set[str] = set()  # names of actors whose deaths were told
        self._broken_in: tuple[str, str] | None = None  # the work and the error of the latest breakdown

    def completed(self, name: str, policy_version: int, work: Callable[[], T]) -> T:
        """Do ``work`` until it ends without a death, and return its result; see ``interface.Recovery``.

        A data plane that fails although it lives counts as dead too. A run recovers
        ``cluster.max_recoveries`` times at most, and raises the next death.
        """
        schedule, weight_sync = self._parts.schedule, self._parts.weight_sync
        prompt_order, served_version = schedule.state_dict(), weight_sync.version
        versions = [group.version for group in self._parts.groups]
        is_again = False
        while True:
            try:
                if is_again and served_version == policy_version:
                    # The engines had these weights when the work began, so the transfer that the recovery
                    # needs must not count as the work's own.
                    weight_sync.ensure_version(policy_version)
                return work()
            except (ActorDied, ActorFailed) as error:
                death = error if isinstance(error, ActorDied) else self._broken_host(error)
                schedule.abandon(name)
                self._recover(death, name, versions)
            schedule.load_state_dict(prompt_order)
            weight_sync.forget()
            is_again = True

    def _broken_host(self, error: ActorFailed) -> ActorDied:
        """Return the death of the data plane's host if a broken data plane caused ``error`` although its
        processes live; raise ``error`` if it has another cause."""
        host = self._parts.actors.host
        is_by_check = is_own(error.cause) or isinstance(error.cause, CODE_ERRORS)
        is_of_host = error.actor == host.name and not is_by_check
        if not (is_of_host or isinstance(error.cause, StorageFailed)):
            raise error
        kind = type(error.cause).__name__
        return ActorBroken(host.name, error.stage, host.log_path, in_short(error.cause), kind)

    def _recover(self, death: ActorDied, name: str, versions: Sequence[int]) -> None:
        """Replace dead processes, until every process is alive, connected and idle.

        Raises ActorDied when a process cannot be replaced, or when replacing it would not save the run.
        """
        while True:
            self._check(death, name, versions)
            self._num_recoveries += 1
            self._to_replace.add(death.actor)
            self._parts.logger.warn(
                f"{death}\nreplacing what died and doing {name} again (recovery {self._num_recoveries} of "
                f"{self._cfg.max_recoveries})"
            )
            try:
                self._replace_dead()
                return
            except ActorDied as another:
                death = another

    def _check(self, death: ActorDied, name: str, versions: Sequence[int]) -> None:
        """Raise ``death`` unless the run can go on once the actor is replaced.

        It cannot when a training worker died, a node was lost, recoveries are used up, the same error came
        when the work ``name`` was done before, the disk is full, or the groups are no longer at ``versions``.
        """
        if isinstance(death, ActorBroken) and death.stage != _STAGE:
            if self._broken_in == (name, death.kind):
                self._parts.logger.warn(f"{death.kind} came again when {name} was done again")
                raise death
            self._broken_in = name, death.kind
        if is_disk_full(death, self._parts.directory.path):
            raise death
        is_worker = death.actor in {worker.name for worker in self._parts.actors.workers}
        if is_worker or death.lost_nodes or self._num_recoveries == self._cfg.max_recoveries:
            raise death
        if [group.settle() for group in self._parts.groups] != versions:
            self._parts.logger.warn("a model had begun to change, so the step cannot be done again")
            raise death

    def _replace_dead(self) -> None:
        parts, actors = self._parts, self._parts.actors
        # The cluster may learn later of a death that a call has told, and not of a data plane that fails
        # although it lives.
        dead = {*parts.cluster.dead(), *self._to_replace}
        for worker in actors.workers:
            if worker.name in dead:
                raise ActorDied(worker.name, _STAGE, worker.log_path)
        if actors.rollout.name not in dead | self._not_connected:
            parts.rollout.abandon()
        living = [engine for engine in actors.engines if engine.name not in dead]
        dead |= {engine.name for engine in living if not self._abort_requests(engine)}
        parts.partitions.take_operations()
        with _failed_starts_as_deaths():
            self._start_again(dead)
            self._to_replace = set()
            self._not_connected |= dead
            started = [handle for handle in actors.all() if handle.name in self._not_connected]
            ready = parts.cluster.gather(
                actors.readiness(started), stage=_STAGE, timeout_s=self._cfg.start_timeout_s
            )
        for handle, answer in zip(started, ready, strict=True):
            if handle.name == actors.rollout.name:
                self._check_sources(answer)
        self._connect(self._not_connected)
        write_process_ids(parts.cluster, actors, parts.directory)
        self._not_connected = set()

    def _check_sources(self, rollout: RolloutParts) -> None:
        """Raise RunFailed when a new rollout actor has read other data than the previous one."""
        before = saved_data(self._parts.sources)
        difference = other_training_data(before, rollout.sources) or other_held_out_data(
            before, rollout.sources
        )
        if difference is not None:
            raise RunFailed(
                f"the data have changed since the run started, and {self._parts.actors.rollout.name}, which "
                f"was started again, read them anew: {difference}. Put the data of before in their place, "
                "then run again: it continues from its latest checkpoint"
            )

    def _abort_requests(self, engine: ActorHandle) -> bool:
        """Have an engine abort its requests; return False when it is dead or fails, and must be replaced."""
        try:
            call = engine.submit("abort_all")
            self._parts.cluster.gather(
                [call], stage=_STAGE, timeout_s=self._cfg.stage_timeout_s, watching=[engine]
            )
            return True
        except (ActorDied, ActorFailed):
            return False

    def _start_again(self, dead: set[str]) -> None:
        """Discard these processes and start new ones in their place, without waiting until they are ready."""
        starter, actors = self._parts.starter, self._parts.actors
        for handle in actors.all():
            if handle.name in dead:
                self._parts.cluster.discard(handle)
        if actors.host.name in dead:
            actors.host = starter.host()
        lost = [index for index, engine in enumerate(actors.engines) if engine.name in dead]
        for index, engine in zip(lost, starter.engines(lost), strict=True):
            actors.engines[index] = engine
        for name, pool in actors.environments.items():
            for index, environment in enumerate(pool):
                if environment.name in dead:
                    pool[index] = starter.environment(name, index)
        if actors.rollout.name in dead:
            data_plane = starter.data_plane(actors.host)
            actors.rollout = starter.rollout(actors.engines, actors.environments, data_plane)

    def _connect(self, new: set[str]) -> None:
        """Connect the new processes with all others."""
        parts, actors = self._parts, self._parts.actors
        data_plane = parts.starter.data_plane(actors.host)
        if actors.host.name in new:
            parts.cluster.watch(actors.host, actors.host.submit("storage_failure"))
            parts.partitions.move_to(actors.host)
            for group in parts.groups:
                group.reconnect_data_plane(data_plane)
        if actors.rollout.name in new:
            parts.rollout.move_to(actors.rollout)
        parts.rollout.reconnect(actors.engines, actors.environments, data_plane)
        new_engines = [engine for engine in actors.engines if engine.name in new]
        if new_engines:
            parts.observation.mark_ranges(new_engines)
            if parts.policy:
                parts.policy.connect_weights(actors.engines)


@contextmanager
def _failed_starts_as_deaths() -> Iterator[None]:
    """Turn ActorFailed of a new process into ActorDied, so that the process is started once more.

    Its start may fail because the memory of its predecessor is not free yet.
    """
    try:
        yield
    except ActorFailed as error:
        reason, kind = in_short(error.cause), type(error.cause).__name__
        raise ActorBroken(error.actor, _STAGE, error.log_path, reason, kind) from error
