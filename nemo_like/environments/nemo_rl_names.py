"""Lets modules with environments of NeMo-RL be imported where NeMo-RL is not installed.

Such a module imports the interface that it implements, and types. NeMo-RL can hardly be installed beside this
framework, since its versions of torch and vLLM are others. Nothing private is used; where ``nemo_rl`` can be
imported, the names are its own.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Generic, NamedTuple, TypeVar

MetadataT = TypeVar("MetadataT")


class EnvironmentReturn(NamedTuple, Generic[MetadataT]):
    """What a step of an environment returns, one entry per conversation in each field."""

    observations: list[dict[str, str]]
    metadata: list[MetadataT]
    next_stop_strings: list[list[str] | None] | list[None]
    rewards: Any
    terminateds: Any
    answers: list[str | None] | None


class EnvironmentInterface(ABC, Generic[MetadataT]):
    """The base class of environments."""

    @abstractmethod
    def step(
        self, message_log_batch: list[list[dict[str, Any]]], metadata: list[MetadataT]
    ) -> EnvironmentReturn[MetadataT]:
        """Judge the last message of each conversation."""

    @abstractmethod
    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, Any]]:
        """Return a batch with its metrics."""


class BatchedDataDict(dict[str, Any], Generic[MetadataT]):
    """A mapping of names to batched values."""


_NAMES: dict[str, dict[str, Any]] = {
    "": {},
    ".data": {},
    ".data.interfaces": {"LLMMessageLogType": list[dict[str, Any]], "DatumSpec": dict[str, Any]},
    ".distributed": {},
    ".distributed.batched_data_dict": {"BatchedDataDict": BatchedDataDict},
    ".environments": {},
    ".environments.interfaces": {
        "EnvironmentInterface": EnvironmentInterface,
        "EnvironmentReturn": EnvironmentReturn,
        "MetadataT": MetadataT,
    },
}


def add_nemo_rl_names() -> None:
    """Let this process import the interfaces of NeMo-RL, unless they can be imported already."""
    if "nemo_rl" in sys.modules or find_spec("nemo_rl") is not None:
        return
    for below, names in _NAMES.items():
        module = ModuleType(f"nemo_rl{below}", "Stands in for a module of NeMo-RL, which is not installed.")
        module.__path__ = []
        vars(module).update(names)
        sys.modules[module.__name__] = module
