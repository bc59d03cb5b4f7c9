"""The benchmark's processes: stations, this framework's data plane, a plain TransferQueue."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray

from nemo_like.cluster.actors import ActorHandle, ActorSpec, start_actor
from nemo_like.cluster.cpu_environment import CPU_ENVIRONMENT
from nemo_like.compat.lean_ray import few_services
from nemo_like.configuration import load_config
from nemo_like.data_plane.mooncake import Master, environment
from nemo_like.data_plane.options import DataPlaneConfig, MooncakeConfig
from nemo_like.data_plane.spec import DataPlaneSpec, host_actor
from nemo_like.data_plane.storage_import import TRANSFER_QUEUE_ENVIRONMENT
from scripts.bench.data_plane_bench.flow import Cast
from scripts.bench.data_plane_bench.planes import tensor_dtypes
from scripts.bench.data_plane_bench.station import Station

PLANES = ("ours", "transfer_queue_plain", "ray_object_store")
_ROOT = Path(__file__).resolve().parents[3]
_START_TIMEOUT_S = 300.0
# What the caller has on PYTHONPATH stays there: packages may be installed in folders that only it names.
_IMPORT_PATH = [str(_ROOT), str(_ROOT / "scripts" / "bench"), os.environ.get("PYTHONPATH", "")]
# Every process that uses TransferQueue plainly brings a segment of its own.
_PLAIN_SEGMENT_BYTES = 1 << 30
_PLAIN_BUFFER_BYTES = 512 << 20
_ENVIRONMENT = {
    **CPU_ENVIRONMENT,
    **TRANSFER_QUEUE_ENVIRONMENT,
    "PYTHONPATH": os.pathsep.join(filter(None, _IMPORT_PATH)),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@dataclass(frozen=True, slots=True)
class Bench:
    cast: Cast
    sink: ActorHandle

    def processes(self) -> list[psutil.Process]:
        """Everything that works on a step: the driver, the actors, the storage's processes."""
        me = psutil.Process()
        names = ("ray::", "mooncake_master")
        found = [me]
        for process in me.children(recursive=True):
            if any(name in " ".join(process.cmdline()) for name in names):
                found.append(process)
        return found


@contextmanager
def started(backend: str, num_workers: int, dtype_choice: str) -> Iterator[Bench]:
    """Every process up and connected to every plane."""
    os.environ.update(_ENVIRONMENT)
    cfg = load_config("configs/grpo_arithmetic_cpu.yaml", [f"data_plane.backend={backend}"]).data_plane
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        with few_services():
            ray.init(
                address="local",
                num_cpus=32,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=3 << 30,
                runtime_env={"env_vars": _ENVIRONMENT},
            )
        host, spec = _our_host(cfg)
        stack.callback(_stop_host, host)
        stack.enter_context(_plain_transfer_queue(cfg))
        workers = [_station(f"worker-{rank}") for rank in range(num_workers)]
        driver, producer = Station(), _station("producer")
        sink = start_actor(ActorSpec("sink", "data_plane_bench.transport:Sink", num_cpus=0, env=_ENVIRONMENT))
        sources = {
            "ours": spec,
            "transfer_queue_plain": tensor_dtypes(dtype_choice),
            "ray_object_store": tensor_dtypes(dtype_choice),
        }
        for plane, source in sources.items():
            for call in [station.submit("connect", plane, source) for station in (producer, *workers)]:
                call.result(_START_TIMEOUT_S)
            driver.connect(plane, source)
        yield Bench(Cast(driver=driver, producer=producer, workers=workers, host=host), sink)


def _station(name: str) -> ActorHandle:
    target = "data_plane_bench.station:Station"
    return start_actor(ActorSpec(name, target, num_cpus=0, env=_ENVIRONMENT))


def _our_host(cfg: DataPlaneConfig) -> tuple[ActorHandle, DataPlaneSpec]:
    host = start_actor(
        host_actor(cfg, run_id=f"bench-{uuid.uuid4().hex[:8]}", start_timeout_s=_START_TIMEOUT_S)
    )
    host.submit("ready").result(_START_TIMEOUT_S)
    return host, DataPlaneSpec(
        host=host,
        backend=cfg.backend,
        timeout_s=cfg.timeout_s,
        start_timeout_s=_START_TIMEOUT_S,
        is_observed=False,
    )


def _stop_host(host: ActorHandle) -> None:
    host.submit("stop").result(_START_TIMEOUT_S)


@contextmanager
def _plain_transfer_queue(cfg: DataPlaneConfig) -> Iterator[None]:
    """As its own ``init`` starts it; other processes attach by ``init`` without arguments."""
    import transfer_queue
    from omegaconf import OmegaConf

    with ExitStack() as stack:
        storage: dict[str, Any] = {
            "storage_backend": "SimpleStorage",
            "SimpleStorage": {"total_storage_size": None, "num_data_storage_units": cfg.num_storage_units},
        }
        if cfg.backend == "mooncake_cpu":
            settings = stack.enter_context(_mooncake(cfg.mooncake_cfg))
            storage = {"storage_backend": "MooncakeStore", "MooncakeStore": settings}
        # With polling_mode off its controller sleeps seconds in its only request thread.
        transfer_queue.init(OmegaConf.create({"controller": {"polling_mode": True}, "backend": storage}))
        stack.callback(transfer_queue.close)
        yield


@contextmanager
def _mooncake(cfg: MooncakeConfig) -> Iterator[dict[str, Any]]:
    """A mooncake_master of one's own: TransferQueue's would first kill every other on the machine."""
    address = ray.util.get_node_ip_address()
    os.environ.update(environment(address))
    master = Master(cfg, address)
    try:
        yield {
            "auto_init": False,
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": asyncio.run(master.start()),
            "local_hostname": address,
            "protocol": cfg.protocol.value,
            "global_segment_size": _PLAIN_SEGMENT_BYTES,
            "local_buffer_size": _PLAIN_BUFFER_BYTES,
        }
    finally:
        master.stop()


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """User and system time that these processes have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)
