"""``BackendKind``: describes a training backend to all other parts; each backend has one file with it.

backend_kinds/fsdp.py    KIND = BackendKind(about=..., backend="package.module:Class", axes=..., ...)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from typing import Any

from nemo_like.config.problems import Problem
from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.options import (
    BACKEND_KINDS,
    LoraConfig,
    Precision,
    TrainedGroupConfig,
    WorkerGroupConfig,
)

# Bytes of a float32 number, and of Adam's two moments per trained parameter. Muon has one momentum.
FLOAT32 = 4
MOMENTS = 2 * FLOAT32


class Library(Enum):
    """The library that takes the arguments."""

    vllm = "vLLM's EngineArgs"
    megatron_model = "Megatron-core's TransformerConfig"
    megatron_optimizer = "Megatron-core's OptimizerConfig"
    transformers = "transformers"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMemory:
    """Bytes that one worker holds, by purpose; ``plan.policy_memory.PolicyMemory`` explains each."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    starting: int = 0
    whole_layers: int = 0  # while the model computes
    whole_gradients: int = 0  # until an update
    stored: int = 0
    gathered: int = 0
    on_host: int = 0


def weight_bytes_of(policy: WorkerGroupConfig) -> int:
    """Return the bytes of one weight in a group's precision."""
    return FLOAT32 if policy.precision is Precision.float32 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """A training backend. Keys are full ones below a worker group, such as "fsdp_cfg.cpu_offload".

    about: names the library and the models that it trains.
    backend: import path of a ``TrainingBackend`` (policy/backends/interface.py), called with (cfg, objective,
        coordinates); it is imported in workers alone.
    imported_without: optional packages that are kept from being loaded with it.
    part: the config group of the backend's own keys; keys in other backends' groups must not be set.
    axes: for each of the axes tp, cp, pp and ep over which the backend can spread a model, the key with its
        size. Each data-parallel replica has tp x cp x pp workers.
    sequence_parallel: the key with which tp ranks also divide the tokens outside of attention and FFN.
    layout_prefix: a text before the sizes of the axes in the plan.
    has_stages: the plan names the size of pp also where it is 1.
    all_gather_weights: every worker takes part when weights are gathered; else only workers beside a sender.
    passes_on: the keys of ``part`` whose arguments go to a library as they are.
    held_memory: returns the memory that a rank's worker holds.
    stores_weights: returns whether a checkpoint has weights besides their masters in float32; None: never.
    optimizer_sharding: the key that spreads the optimizer's state over data-parallel ranks, if there is one.
    refusal: returns why the backend cannot train a model, and a remedy, from the group's name and the model's
        config.json; None where it can.
    problems: yields the problems of a worker group's keys with this backend, from the group's name and keys.
    model_problems: yields the problems of the group's model, except axis sizes that do not divide it.
    adapter_problem: builds the model in a directory, and returns why its layers cannot get the adapters of a
        worker group, which is named; called in a child process.
    missing_kernels: yields the kernels for training on GPUs that this machine lacks.
    """

    about: str
    backend: str
    imported_without: Collection[str] = ()
    part: str
    axes: Mapping[str, str] = field(default_factory=dict)
    sequence_parallel: str = ""
    layout_prefix: str = ""
    has_stages: bool = False
    all_gather_weights: bool = True
    passes_on: Mapping[str, Library] = field(default_factory=dict)
    held_memory: Callable[[WorkerGroupConfig, ModelInfo, int], HeldMemory]
    stores_weights: Callable[[TrainedGroupConfig], bool] | None = None
    optimizer_sharding: str = ""
    refusal: Callable[[str, Mapping[str, Any]], tuple[str, str] | None] | None = None
    problems: Callable[[str, WorkerGroupConfig], Iterator[Problem]] | None = None
    model_problems: Callable[[str, WorkerGroupConfig, ModelInfo], Iterator[Problem]] | None = None
    adapter_problem: Callable[[str, str, LoraConfig], str | None] | None = None
    missing_kernels: Callable[[WorkerGroupConfig], Iterator[str]] | None = None


def backend_kind_of(group: WorkerGroupConfig) -> BackendKind:
    """Return the description of a worker group's backend."""
    kind: BackendKind = BACKEND_KINDS.load(group.backend)
    return kind


def axis_size(group: WorkerGroupConfig, axis: str) -> int:
    """Return how many ranks a group's model is spread over on tp, cp, pp or ep; 1 where the backend has no
    such axis."""
    key = backend_kind_of(group).axes.get(axis)
    size: int = 1 if key is None else attrgetter(key)(group)
    return size


def sequence_parts(group: WorkerGroupConfig) -> int:
    """Return over how many ranks sequence parallelism divides the tokens outside of attention and FFN."""
    key = backend_kind_of(group).sequence_parallel
    return axis_size(group, "tp") if key and attrgetter(key)(group) else 1
