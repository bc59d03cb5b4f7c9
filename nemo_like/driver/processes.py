"""Starts every process of a run with its arguments.

All processes start side by side, since most of a start is imports. ``plan.plan.roles`` says how many there
are of each kind: a replay has no engines and no environments, a generation-only run no policy workers. A
process that died is started again in the same way.
"""

from __future__ import annotations

import json
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from nemo_like.batch.columns import TOKEN_ADVANTAGES
from nemo_like.cluster.actors import ActorHandle, ActorSpec, Call, Concurrency
from nemo_like.cluster.cluster import Cluster, OnWait
from nemo_like.cluster.coordinates import MeetingPlace
from nemo_like.cluster.options import longest_deadline_s
from nemo_like.cluster.runtime import RayNeeds
from nemo_like.cluster.stage import EngineHolds
from nemo_like.configuration import Config
from nemo_like.data_plane.spec import DataPlaneSpec, host_actor
from nemo_like.driver.run_forks import fork_server, torch_environment
from nemo_like.generation.engine_spec import EngineNode
from nemo_like.generation.environment import WAITING_METHODS, engine_environment, unused_by_engines
from nemo_like.models.model_info import read_model_info
from nemo_like.models.remote_code import code_environment
from nemo_like.observability.disk import write_whole
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.plan.derived import shares_gpus, weight_transport
from nemo_like.plan.engine_of_run import engine_of_run
from nemo_like.plan.places import Place, gpus_by_node, weight_replicas
from nemo_like.plan.roles import (
    Role,
    actor_name,
    engine_actors,
    environment_role,
    ray_cpus,
    roles,
    worker_groups,
)
from nemo_like.policy.backends.interface import FurtherColumns, WeightSenderSpec, WorkerConnections
from nemo_like.policy.batch.policy_columns import dumped_columns
from nemo_like.policy.groups.layout import is_one_engine
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.options import TeacherConfig
from nemo_like.rollout.rollout_columns import forest_columns
from nemo_like.rollout.tasks import used_environments

# The deadline of calls to processes that are up already and have nothing to compute.
SHORT_TIMEOUT_S = 30.0
_ASYNC_ROLES = (Role.rollout, Role.environment, Role.reward_model, Role.endpoint)
_PART = "nemo_like.generation.engine_part:EnginePart"
OWN_TARGETS = {
    Role.engine: "nemo_like.generation.vllm_engine:VllmEngine",
    Role.policy_worker: "nemo_like.policy.workers.worker:PolicyWorker",
}


@dataclass(slots=True, kw_only=True)
class Actors:
    """Handles of the present processes of a run; a recovery replaces handles of processes that died."""

    host: ActorHandle
    engines: list[ActorHandle]
    groups: dict[Role, list[ActorHandle]]  # the training workers, by the role of their group
    environments: dict[str, list[ActorHandle]]  # by the environment's name
    rollout: ActorHandle

    @property
    def workers(self) -> list[ActorHandle]:
        """The training workers of all groups, the policy's first."""
        return [worker for group in self.groups.values() for worker in group]

    def all(self) -> list[ActorHandle]:
        """Return every handle, in the order in which data passes the processes."""
        environments = (actor for pool in self.environments.values() for actor in pool)
        return [self.rollout, *self.engines, *environments, self.host, *self.workers]

    def readiness(self, started: Sequence[ActorHandle]) -> list[Call]:
        """Submit a call to each of these processes that returns once the process is ready.

        The rollout actor's call returns ``RolloutParts``: the reports of the datasets, and the rollout's
        columns.
        """
        methods = {self.host.name: "ready"}
        methods |= {worker.name: "setup" for worker in self.workers}
        methods |= {engine.name: "stats" for engine in self.engines}
        methods |= {actor.name: "start" for pool in self.environments.values() for actor in pool}
        return [
            handle.submit("attach", handle)
            if handle.name == self.rollout.name
            else handle.submit(methods[handle.name])
            for handle in started
        ]


def write_process_ids(cluster: Cluster, actors: Actors, directory: RunDirectory) -> None:
    """Write each process's name and process id to RUN_DIR/processes.json, for py-spy, top or kill."""
    handles = actors.all()
    calls = [handle.process_id() for handle in handles]
    pids = cluster.gather(calls, stage="start", timeout_s=SHORT_TIMEOUT_S)
    by_name = {handle.name: pid for handle, pid in zip(handles, pids, strict=True)}
    contents = json.dumps(by_name, indent=2) + "\n"
    write_whole(directory.path / "processes.json", contents.encode(), "processes.json")


def ray_needs(cfg: Config, places: Sequence[Place], directory: RunDirectory) -> RayNeeds:
    """Return what Ray has to have for processes at ``places``; its logs go into ``directory``."""
    return RayNeeds(
        address=cfg.cluster.address,
        num_cpus=ray_cpus(cfg) if cfg.cluster.num_cpus is None else cfg.cluster.num_cpus,
        num_gpus=sum(gpus_by_node(places).values()),
        start_timeout_s=cfg.cluster.start_timeout_s,
        logs_path=directory.logs_path / "ray",
        fork_server=fork_server(cfg),
    )


class Starter:
    """Starts processes, with one method per kind.

    No method waits until its processes are ready, except for engines that share GPUs with the policy.
    """

    def __init__(
        self,
        cfg: Config,
        cluster: Cluster,
        directory: RunDirectory,
        places: Sequence[Place],
        on_wait: OnWait | None = None,
        targets: Mapping[Role, str] = OWN_TARGETS,
    ) -> None:
        """Prepare to start the run's processes at ``places``. ``on_wait`` is as in ``Cluster.gather``.

        ``targets`` names the classes of engines and of policy workers.
        """
        self._cfg, self._cluster, self._directory = cfg, cluster, directory
        self._on_wait, self._targets = on_wait, targets
        self._needs = roles(cfg)
        self._weight_replicas = weight_replicas(cfg, places)
        self._parts: dict[str, list[ActorHandle]] = {}  # by engine, its parts on further nodes
        self._gpus = {place.actor: {(place.node, gpu) for gpu in place.gpus} for place in places}

    def all(self) -> Actors:
        """Start every process of the run."""
        host = self.host()
        data_plane = self.data_plane(host)
        environments = self.environments()
        # Workers touch no GPU before they are told to set up.
        groups = {role: self.workers(role, data_plane) for role in worker_groups(self._cfg)}
        engines = self.engines(range(self._needs[self._answering].count))
        return Actors(
            host=host,
            engines=engines,
            groups=groups,
            environments=environments,
            rollout=self.rollout(engines, environments, data_plane),
        )

    def data_plane(self, host: ActorHandle) -> DataPlaneSpec:
        """Return the connection data with which other processes reach the host's data plane."""
        return DataPlaneSpec(
            host=host,
            backend=self._cfg.data_plane.backend,
            timeout_s=self._cfg.data_plane.timeout_s,
            start_timeout_s=self._cfg.cluster.start_timeout_s,
            is_observed=self._cfg.data_plane.log_operations,
        )

    def host(self) -> ActorHandle:
        return self._cluster.start(
            host_actor(
                self._cfg.data_plane,
                run_id=f"{self._directory.name}-{uuid.uuid4().hex[:8]}",
                start_timeout_s=self._cfg.cluster.start_timeout_s,
                log_path=self._directory.log_path("data_plane"),
            )
        )

    def engines(self, indices: Sequence[int], *, then_sleep: bool = True) -> list[ActorHandle]:
        """Start the engines with these indices.

        Engines on GPUs shared with the policy are ready at the return, and asleep, without the weights that
        they have read, unless ``then_sleep`` is false. Engines on one GPU start one after the other, each
        when the previous one sleeps: vLLM measures the GPU's memory while it starts, and no other process
        may take or release memory meanwhile. Raises the errors of ``Cluster.gather``.
        """
        if self._answering is Role.endpoint:
            return [self._endpoint(index) for index in indices]
        if not shares_gpus(self._cfg):
            return [self._engine(index) for index in indices]
        timeout_s = self._cfg.cluster.start_timeout_s
        engines: dict[int, ActorHandle] = {}
        for wave in self._waves(indices):
            starting = {index: self._engine(index) for index in wave}
            engines |= starting
            asked: list[tuple[str, tuple[EngineHolds, ...]]] = [("stats", ())]
            if then_sleep:
                asked.append(("hold", (EngineHolds.nothing,)))
            for method, arguments in asked:
                calls = [engine.submit(method, *arguments) for engine in starting.values()]
                self._cluster.gather(
                    calls,
                    stage="start",
                    timeout_s=timeout_s,
                    watching=list(starting.values()),
                    on_wait=self._on_wait,
                )
        return [engines[index] for index in indices]

    @property
    def _answering(self) -> Role:
        """The role of the processes that sample responses: engines, or the client of a server."""
        return Role.endpoint if Role.endpoint in self._needs else Role.engine

    def _endpoint(self, index: int) -> ActorHandle:
        """Start the client of the server that samples instead of engines."""
        return self._start(
            Role.endpoint,
            index,
            "nemo_like.generation.endpoint_engine:EndpointEngine",
            torch_environment(self._cfg),
            name=Role.endpoint.name,
            cfg=self._cfg.evaluation,
            tokenizer_name=str(Path(self._cfg.policy.model_name).absolute()),
        )

    def _waves(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Yield the engines in groups within which no two share a GPU."""
        left = list(indices)
        while left:
            taken: set[tuple[int, int]] = set()
            wave = []
            for index in left:
                gpus = self._gpus[actor_name(Role.engine, self._needs[Role.engine], index)]
                if not gpus & taken:
                    wave.append(index)
                    taken |= gpus
            yield wave
            left = [index for index in left if index not in wave]

    def _engine(self, index: int) -> ActorHandle:
        """Start an engine, which serves the weights of ``policy.model_name`` until a trainer sends new ones.

        Where it is spread over nodes, start its parts on all of them, and end those of an earlier start.
        """
        (_, engine), *parts = engine_actors(self._cfg, index)
        for part in self._parts.pop(engine, ()):
            self._cluster.discard(part)
        if not parts:
            return self._engine_process(Role.engine, index, self._targets[Role.engine], f"engine-{index}")
        address, port = self._cluster.endpoint(engine, timeout_s=self._cfg.cluster.start_timeout_s)
        nodes = [EngineNode(rank, address, port) for rank in range(1 + len(parts))]
        self._parts[engine] = [
            self._engine_process(role, f"{index}-{node.rank}", _PART, name, node=node)
            for (role, name), node in zip(parts, nodes[1:], strict=True)
        ]
        target = self._targets[Role.engine]
        started = self._engine_process(Role.engine, index, target, f"engine-{index}", node=nodes[0])
        for part in self._parts[engine]:
            self._cluster.watch(started, part.watch())  # the engine is of no use without it
        return started

    def _engine_process(
        self, role: Role, index: int | str, target: str, name: str, **node: EngineNode
    ) -> ActorHandle:
        return self._start(
            role,
            index,
            target,
            engine_environment(self._cfg.policy.device, self._cfg.generation.vllm_cfg.num_nodes),
            name=name,
            spec=engine_of_run(self._cfg),
            timeout_s=self._patience_s(),
            **node,
        )

    def workers(self, role: Role, data_plane: DataPlaneSpec | None) -> list[ActorHandle]:
        """Start the workers of one training group; without ``data_plane`` they can fetch no samples."""
        cfg, group = self._cfg, worker_groups(self._cfg)[role]
        if is_one_engine(group):
            assert data_plane is not None
            return [self._teacher_engine(group, data_plane)]
        layout = parallel_layout(group)
        meeting_place = self._meeting_place(role)
        target, own = self._worker(role)
        inputs = forest_columns(cfg)
        return [
            self._start(
                role,
                rank,
                target,
                torch_environment(cfg),
                cfg=group,
                loss=cfg.loss_fn,
                connections=WorkerConnections(
                    layout.coordinates(rank), data_plane, meeting_place, self._patience_s(), inputs
                ),
                **own,
            )
            for rank in range(self._needs[role].count)
        ]

    def _teacher_engine(self, teacher: TeacherConfig, data_plane: DataPlaneSpec) -> ActorHandle:
        """Start the engine that scores for a teacher instead of workers."""
        return self._start(
            Role.teacher_worker,
            0,
            "nemo_like.policy.groups.teacher_engine:TeacherEngine",
            engine_environment(teacher.device),
            cfg=replace(teacher, model_name=str(Path(teacher.model_name).absolute())),
            loss=self._cfg.loss_fn,
            generation=self._cfg.generation,
            data_plane=data_plane,
            timeout_s=self._patience_s(),
            inputs=forest_columns(self._cfg),
        )

    def _worker(self, role: Role) -> tuple[str, dict[str, object]]:
        """Return the class of a group's workers, and the arguments that workers of other groups do not
        have."""
        if role is Role.policy_worker:
            return self._targets[role], self._of_policy()
        if role is Role.value_worker:
            return "nemo_like.policy.workers.value_worker:ValueWorker", {
                "tripwires": self._cfg.debug.tripwires
            }
        return "nemo_like.policy.workers.teacher_worker:TeacherWorker", self._of_teacher()

    def _of_teacher(self) -> dict[str, object]:
        """Return the arguments of a teacher's worker that workers of other groups do not have."""
        policy = self._cfg.policy
        return {
            "temperature": self._cfg.generation.temperature,
            "vocab_size": read_model_info(policy.model_name, policy.backend).vocab_size,
        }

    def _of_policy(self) -> dict[str, object]:
        """Return the arguments of a policy worker that workers of other groups do not have."""
        cfg = self._cfg
        sender = WeightSenderSpec(
            "nemo_like.weight_sync.sender:EngineWeightSender",
            {
                "device": cfg.policy.device,
                "transport": weight_transport(cfg),
                "bucket_mib": cfg.generation.weight_bucket_mib,
                "delta": cfg.generation.weight_delta,
                "timeout_s": self._patience_s(),
                "replicas": self._weight_replicas,
                "tripwires": cfg.debug.tripwires,
            },
            cfg.generation.lora_sync,
        )
        return {
            "temperature": cfg.generation.temperature,
            "weight_sender": sender if self._needs[Role.engine].count else None,
            "weight_replicas": self._weight_replicas,
            "tripwires": cfg.debug.tripwires,
            "further": FurtherColumns(
                reads=() if cfg.value is None else (TOKEN_ADVANTAGES,),
                writes=dumped_columns(cfg.loss_fn, cfg.rollout),
            ),
        }

    def environments(self) -> dict[str, list[ActorHandle]]:
        """Start a pool of ``num_actors`` actors for each environment that the run uses; the pool of a
        weighted sum is empty."""
        used = used_environments(self._cfg) if self._cfg.rollout.replay is None else {}
        return {
            name: [self.environment(name, index) for index in range(env.num_actors)]
            for name, env in used.items()
        }

    def environment(self, name: str, index: int) -> ActorHandle:
        cfg = self._cfg.env[name]
        return self._start(
            environment_role(cfg),
            f"{name}-{index}",
            "nemo_like.environments.server:EnvironmentServer",
            {},
            name=name,
            cfg=cfg,
        )

    def rollout(
        self,
        engines: list[ActorHandle],
        environments: dict[str, list[ActorHandle]],
        data_plane: DataPlaneSpec,
    ) -> ActorHandle:
        """Start the rollout actor. A replay reads a recording, so it gets no engines and no environments."""
        if self._cfg.rollout.replay is not None:
            return self._replay(self._cfg.rollout.replay, data_plane)
        return self._start(
            Role.rollout,
            0,
            "nemo_like.rollout.sync_rollout:SyncRolloutActor",
            torch_environment(self._cfg),
            cfg=self._cfg,
            engines=engines,
            environments=environments,
            data_plane=data_plane,
            run_directory=str(self._directory.path),
        )

    def _replay(self, directory: str, data_plane: DataPlaneSpec) -> ActorHandle:
        return self._start(
            Role.rollout,
            0,
            "nemo_like.rollout.replay:ReplayRolloutActor",
            torch_environment(self._cfg),
            directory=str(Path(directory).absolute()),
            data_plane=data_plane,
        )

    def _patience_s(self) -> float:
        """Return how long processes wait for each other, in seconds.

        No such wait is shorter than the driver's own, whose error says more.
        """
        cluster = self._cfg.cluster
        return max(cluster.start_timeout_s, longest_deadline_s(cluster))

    def _meeting_place(self, role: Role) -> MeetingPlace:
        """Return where the workers of a group meet: on one machine, a file in a new folder that only this
        user can read; else an address and port on the first worker's node."""
        cluster = self._cfg.cluster
        if cluster.address is None:
            return Path(tempfile.mkdtemp(prefix="meeting-"), "store")
        first = actor_name(role, self._needs[role], 0)
        return self._cluster.endpoint(first, timeout_s=cluster.start_timeout_s)

    def _start(
        self, role: Role, index: int | str, target: str, env: dict[str, str], **kwargs: object
    ) -> ActorHandle:
        needs = self._needs[role]
        name = actor_name(role, needs, index)
        copies = self._directory.path / "checkpoint_code" / name
        waiting_methods = WAITING_METHODS if role is Role.engine and self._cfg.grpo.max_staleness > 0 else ()
        is_engine = role in (Role.engine, Role.engine_part)
        is_async = role in _ASYNC_ROLES or bool(waiting_methods)
        return self._cluster.start(
            ActorSpec(
                name=name,
                target=target,
                kwargs=kwargs,
                num_cpus=needs.num_cpus,
                env=env | code_environment(self._cfg.policy, copies),
                concurrency=Concurrency.asyncio if is_async else Concurrency.serial,
                in_threads=waiting_methods,
                log_path=self._directory.log_path(name),
                without=unused_by_engines(self._cfg.policy.device) if is_engine else (),
            )
        )
