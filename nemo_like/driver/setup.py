"""Puts the concrete parts together, runs the driver, and ends every process again.

The only module that knows all parts. All processes start at once, since most of a start is imports;
the driver's own imports none of what they need.
"""

from __future__ import annotations

import json
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType

import yaml

from nemo_like.cluster.actors import ActorHandle, ActorSpec, Concurrency
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.errors import ClusterError
from nemo_like.cluster.runtime import free_port, node_address, ray_runtime
from nemo_like.config.loader import to_yaml
from nemo_like.config.plan import Role, ray_cpus, ray_gpus, roles
from nemo_like.config.schema import Config, Device
from nemo_like.data.sampler import PromptSampler
from nemo_like.data_plane.columns import POLICY_COLUMNS, ROLLOUT_COLUMNS
from nemo_like.data_plane.factory import DataPlaneSpec, host_actor
from nemo_like.data_plane.handle import PartitionControl
from nemo_like.driver.sync_grpo import Components, SyncGRPODriver
from nemo_like.generation.environment import engine_environment
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.summary import RunSummary
from nemo_like.policy.group import PolicyWorkerGroup
from nemo_like.policy.interfaces import WeightSenderSpec
from nemo_like.policy.layout import parallel_layout
from nemo_like.rollout.handle import RolloutHandle
from nemo_like.rollout.prompts import RolloutMode
from nemo_like.weight_sync.sync import WeightSync

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

# Exchanges with processes that are up already and have nothing to compute.
_SHORT_TIMEOUT_S = 30.0
_BUCKET_MIB = 64


def run(cfg: Config, config_name: str) -> int:
    """One whole run; the exit code. ``config_name`` names the run directory unless logger.run_name does."""
    name = cfg.logger.run_name or f"{config_name}-{datetime.now():%Y%m%d-%H%M%S}"
    directory = RunDirectory.create(cfg.logger.log_dir, name)
    resolved = to_yaml(cfg)
    directory.write_config(resolved)
    logger = RunLogger(
        cfg.logger,
        directory,
        resolved_config=yaml.safe_load(resolved),
        max_num_steps=cfg.grpo.max_num_steps,
    )
    with logger:
        outcome, exit_code, answers = "finished", 0, []
        try:
            with started(cfg, directory, logger) as parts:
                parts.driver.run()
                if cfg.checkpointing.export_final_hf:
                    logger.status("exporting the policy")
                    parts.policy.export_hf(str(directory.path / "final_hf"))
                answers = parts.rollout.sample_answers()
                logger.status("stopping")
        except KeyboardInterrupt:
            outcome, exit_code = "was interrupted", EXIT_INTERRUPTED
        except (ClusterError, OSError) as error:
            outcome, exit_code = f"failed: {error}", EXIT_FAILED
        logger.finish(RunSummary(outcome=outcome, sample_answers=answers))
    return exit_code


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run whose processes are all up."""

    driver: SyncGRPODriver
    policy: PolicyWorkerGroup
    rollout: RolloutHandle


@contextmanager
def started(cfg: Config, directory: RunDirectory, logger: RunLogger) -> Iterator[StartedRun]:
    """Every process of the run, ready; all of them are gone when the block is left."""
    cluster = Cluster()
    logger.status("starting Ray")
    num_cpus = ray_cpus(cfg) if cfg.cluster.num_cpus is None else cfg.cluster.num_cpus
    num_gpus = max(ray_gpus(cfg), cfg.cluster.num_gpus)
    with (
        ray_runtime(cfg.cluster.address, num_cpus=num_cpus, num_gpus=num_gpus),
        _sigterm_as_interrupt(),  # after Ray, which installs a handler of its own
    ):
        try:
            actors = _start_actors(cfg, cluster, directory)
            yield _connect(cfg, cluster, actors, directory, logger)
        finally:
            cluster.stop()


@dataclass(frozen=True, slots=True)
class _Actors:
    host: ActorHandle
    engines: list[ActorHandle]
    workers: list[ActorHandle]
    environments: list[ActorHandle]
    rollout: ActorHandle
    data_plane: DataPlaneSpec

    def all(self) -> list[ActorHandle]:
        return [self.host, *self.engines, *self.workers, *self.environments, self.rollout]


def _start_actors(cfg: Config, cluster: Cluster, directory: RunDirectory) -> _Actors:
    """Start every process; returns at once."""
    needs, start_timeout_s = roles(cfg), cfg.cluster.start_timeout_s
    host = cluster.start(
        host_actor(
            cfg.data_plane,
            run_id=f"{directory.name}-{uuid.uuid4().hex[:8]}",
            start_timeout_s=start_timeout_s,
            log_path=directory.log_path("data_plane"),
        )
    )
    data_plane = DataPlaneSpec(host=host, timeout_s=cfg.data_plane.timeout_s, start_timeout_s=start_timeout_s)

    def start(role: Role, index: int, target: str, env: dict[str, str], **kwargs: object) -> ActorHandle:
        name = role.name if needs[role].count == 1 else f"{role.name}-{index}"
        is_async = role in (Role.rollout, Role.environment)
        spec = ActorSpec(
            name=name,
            target=target,
            kwargs=kwargs,
            num_cpus=needs[role].num_cpus,
            num_gpus=needs[role].num_gpus,
            env=env,
            concurrency=Concurrency.asyncio if is_async else Concurrency.serial,
            log_path=directory.log_path(name),
        )
        return cluster.start(spec)

    engines = [
        start(
            Role.engine,
            index,
            "nemo_like.generation.vllm_engine:VllmEngine",
            engine_environment(cfg.policy.device),
            name=f"engine-{index}",
            model_name=str(Path(cfg.policy.model_name).absolute()),
            generation=cfg.generation,
            device=cfg.policy.device,
            precision=cfg.policy.precision,
            max_total_sequence_length=cfg.policy.max_total_sequence_length,
            seed=cfg.grpo.seed,
            timeout_s=start_timeout_s,
        )
        for index in range(needs[Role.engine].count)
    ]
    sender = WeightSenderSpec(
        "nemo_like.weight_sync.collective:CollectiveWeightSender",
        {"device": cfg.policy.device, "bucket_mib": _BUCKET_MIB, "timeout_s": start_timeout_s},
    )
    layout, worker_env = parallel_layout(cfg.policy), _worker_environment(cfg)
    master_addr, master_port = node_address(cfg.cluster.address), free_port()
    workers = [
        start(
            Role.policy_worker,
            rank,
            "nemo_like.policy.worker:PolicyWorker",
            worker_env,
            cfg=cfg.policy,
            loss=cfg.loss_fn,
            coordinates=layout.coordinates(rank),
            temperature=cfg.generation.temperature,
            data_plane=data_plane,
            weight_sender=sender,
            master_addr=master_addr,
            master_port=master_port,
            timeout_s=cfg.cluster.stage_timeout_s,
        )
        for rank in range(layout.world_size)
    ]
    environments = [
        start(Role.environment, index, "nemo_like.environments.server:EnvironmentServer", {}, cfg=cfg.env)
        for index in range(needs[Role.environment].count)
    ]
    rollout = start(
        Role.rollout,
        0,
        "nemo_like.rollout.sync_rollout:SyncRolloutActor",
        worker_env,
        cfg=cfg,
        engines=engines,
        environments=environments,
        data_plane=data_plane,
    )
    return _Actors(host, engines, workers, environments, rollout, data_plane)


def _connect(
    cfg: Config, cluster: Cluster, actors: _Actors, directory: RunDirectory, logger: RunLogger
) -> StartedRun:
    """Wait until every process is ready, let them meet, and hand them to a driver."""
    start_timeout_s, stage_timeout_s = cfg.cluster.start_timeout_s, cfg.cluster.stage_timeout_s
    logger.status("starting the data plane, vLLM engines and policy workers")
    (num_prompts, *_) = cluster.gather(
        [
            actors.rollout.submit("attach", actors.rollout),
            actors.host.submit("ready"),
            *(worker.submit("setup") for worker in actors.workers),
            *(engine.submit("stats") for engine in actors.engines),
        ],
        stage="start",
        timeout_s=start_timeout_s,
    )
    cluster.watch(actors.host, actors.host.submit("storage_failure"))
    _write_process_ids(cluster, actors, directory)
    layout = parallel_layout(cfg.policy)
    policy = PolicyWorkerGroup(actors.workers, cluster, layout, cfg.policy, timeout_s=stage_timeout_s)
    logger.status("connecting policy workers and engines")
    policy.connect_weights(actors.engines)
    # The rollout actor keeps the same deadline and can name the prompts that are missing: it answers first.
    rollout = RolloutHandle(cluster, actors.rollout, timeout_s=stage_timeout_s + _SHORT_TIMEOUT_S)
    driver = SyncGRPODriver(
        cfg,
        Components(
            partitions=PartitionControl(
                cluster,
                actors.host,
                columns=(*ROLLOUT_COLUMNS, *POLICY_COLUMNS),
                timeout_s=cfg.data_plane.timeout_s,
            ),
            rollout=rollout,
            policy=policy,
            weight_sync=WeightSync(policy.push_weights),
            train_sampler=PromptSampler(num_prompts[RolloutMode.training], cfg.grpo.seed, cfg.data.shuffle),
            num_validation_prompts=num_prompts[RolloutMode.validation],
            logger=logger,
        ),
    )
    return StartedRun(driver, policy, rollout)


def _worker_environment(cfg: Config) -> dict[str, str]:
    """For processes that load torch."""
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    if cfg.policy.device is Device.cpu:
        # Several processes share the cores, and nothing here is worth compiling.
        env |= {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if cfg.cluster.address is None:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env


def _write_process_ids(cluster: Cluster, actors: _Actors, directory: RunDirectory) -> None:
    """RUN_DIR/processes.json, for py-spy, top or kill."""
    handles = actors.all()
    pids = cluster.gather(
        [handle.process_id() for handle in handles], stage="start", timeout_s=_SHORT_TIMEOUT_S
    )
    by_name = {handle.name: pid for handle, pid in zip(handles, pids, strict=True)}
    (directory.path / "processes.json").write_text(json.dumps(by_name, indent=2) + "\n", encoding="utf-8")


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
