"""The keys of machines, processes and deadlines, ``cluster``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Annotated

from nemo_like.cluster.stage import Stage
from nemo_like.config.keys import Key


class TimeoutAction(Enum):
    """What a run does when a stage has missed its deadline."""

    restart = "restart"  # start all processes anew from the latest checkpoint, see cluster.max_restarts
    stop = "stop"  # end with an error


class Placement(Enum):
    """Whether engines and policy workers have resources of their own."""

    separate = "separate"  # each has its own
    colocated = "colocated"  # engines run on the nodes and processors, or the GPUs, of the policy workers


@dataclass(kw_only=True, slots=True)
class StageTimeoutsConfig:
    """Deadlines of single stages (``Stage``), seconds; null: cluster.stage_timeout_s."""

    weight_sync: Annotated[float | None, Key("from the trainer to the engines", None, above=0)]
    generation: Annotated[float | None, Key("includes the rewards", None, above=0)]
    logprobs: Annotated[float | None, Key("of the policy", None, above=0)]
    teacher_logprobs: Annotated[float | None, Key("of a teacher", None, above=0)]
    values: Annotated[float | None, Key("of a critic", None, above=0)]
    policy_training: Annotated[float | None, Key("the updates of a step", None, above=0)]
    value_training: Annotated[float | None, Key("of a critic", None, above=0)]
    checkpoint: Annotated[float | None, Key("saving, loading, exporting", None, above=0)]
    validation: Annotated[float | None, Key("all of its samples", None, above=0)]


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    """The Ray cluster under the actors."""

    address: Annotated[
        str | None, Key('null: a private Ray on this machine; "auto" or HOST:PORT joins one', None)
    ]
    num_cpus: Annotated[
        int | None,
        Key("logical CPUs of the private Ray; null: as many as the actors ask for", None, at_least=1),
    ]
    num_nodes: Annotated[
        int, Key("machines that policy workers and engines are on; a private Ray has one", 1, at_least=1)
    ]
    gpus_per_node: Annotated[int, Key("NVIDIA GPUs of each machine", 0, at_least=0)]
    gpu_memory_gib: Annotated[
        float | None,
        Key(
            "memory of each GPU, to check the plan before the run; null: only the run checks it",
            None,
            above=0,
        ),
    ]
    host_memory_gib: Annotated[float | None, Key("memory of each node with GPUs, likewise", None, above=0)]
    placement: Annotated[
        Placement,
        Key(
            "engines and policy workers have resources of their own; or colocated: they share them",
            Placement.separate,
        ),
    ]
    start_timeout_s: Annotated[
        float, Key("deadline for Ray to start, and then for all processes to be ready", 300.0, above=0)
    ]
    stage_timeout_s: Annotated[
        float, Key("deadline for each stage of a step that has none of its own below", 600.0, above=0)
    ]
    stage_timeouts_s: Annotated[StageTimeoutsConfig, Key("deadlines of single stages; null: stage_timeout_s")]
    on_stage_timeout: Annotated[
        TimeoutAction,
        Key(
            "restart all processes, see max_restarts; or stop: end the run with exit code 1",
            TimeoutAction.restart,
        ),
    ]
    max_recoveries: Annotated[
        int,
        Key(
            "how often a dead process, not a policy worker, is replaced and the step done again",
            10,
            at_least=0,
        ),
    ]
    max_restarts: Annotated[
        int,
        Key(
            "How often all processes start again from the latest checkpoint, after one died "
            "or missed a deadline. 0: such a failure ends the run",
            2,
            at_least=0,
        ),
    ]


def deadline_s(cfg: ClusterConfig, stage: Stage) -> float:
    """Return a stage's deadline in seconds: its own, or the general one where it has none."""
    own = getattr(cfg.stage_timeouts_s, stage.name)
    return cfg.stage_timeout_s if own is None else float(own)


def longest_deadline_s(cfg: ClusterConfig) -> float:
    """Return the longest deadline of any stage in seconds, for whatever must outlast every stage."""
    return max(deadline_s(cfg, Stage[key.name]) for key in fields(cfg.stage_timeouts_s))
