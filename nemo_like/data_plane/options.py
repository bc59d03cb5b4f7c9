"""The keys of the data plane and of the storage behind it, ``data_plane``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.config.kinds import Kinds

STORAGE_KINDS = Kinds(
    "nemo_like.data_plane.storage_kinds",
    "storage",
    "nemo_like.data_plane.storage_kind:StorageKind",
    has_keys=False,
)


class MooncakeProtocol(Enum):
    """How Mooncake moves bytes."""

    tcp = "tcp"
    rdma = "rdma"


@dataclass(kw_only=True, slots=True)
class MooncakeConfig:
    """Settings that are read only with data_plane.backend=mooncake_cpu."""

    protocol: Annotated[MooncakeProtocol, Key("or rdma", MooncakeProtocol.tcp)]
    rdma_devices: Annotated[
        str | None,
        Key('names with commas between, e.g. "mlx5_0,mlx5_1"; null: all RDMA devices of a node', None),
    ]
    segment_gib: Annotated[
        float,
        Key(
            "memory of one storage unit, taken as it fills; capacity = this x num_storage_units", 2.0, above=0
        ),
    ]
    buffer_mib: Annotated[
        int, Key("memory that every connected process sets aside for transfers", 64, at_least=1)
    ]
    master_port: Annotated[
        int | None,
        Key(
            "TCP port of mooncake_master; null: a free one",
            None,
            at_least=1,
            at_most=65535,
            remedy="null is a free port",
        ),
    ]


@dataclass(kw_only=True, slots=True)
class DataPlaneConfig:
    """The data plane, which holds samples between the rollout that makes them and the trainer."""

    backend: Annotated[
        str,
        Key(
            "simple: TransferQueue's storage units over ZMQ; mooncake_cpu: Mooncake, see mooncake_cfg; "
            "in_memory: for debugging, without TransferQueue",
            "simple",
            kinds=STORAGE_KINDS,
        ),
    ]
    num_storage_units: Annotated[
        int,
        Key(
            "processes that store samples; more help when one cannot move the bytes fast enough",
            1,
            at_least=1,
        ),
    ]
    capacity_gib: Annotated[
        float | None,
        Key(
            "a put that would store more raises an error; null: no limit but the backend's own",
            None,
            above=0,
            remedy="null is no limit",
        ),
    ]
    timeout_s: Annotated[float, Key("deadline for one put, fetch or clear", 60.0, above=0)]
    max_open_partitions: Annotated[
        int,
        Key(
            "opening one more, for the samples of a step, waits until another is closed",
            "${add:2,${grpo.max_staleness}}",
            at_least=1,
        ),
    ]
    log_operations: Annotated[
        bool, Key("metrics data_plane/*: count, bytes, latency and throughput per operation and column", True)
    ]
    mooncake_cfg: Annotated[MooncakeConfig, Key("read only with backend=mooncake_cpu")]
