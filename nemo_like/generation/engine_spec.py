"""``EngineSpec``: the engine that a run needs. The driver makes it, an engine's process reads it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.batch.columns import Column
from nemo_like.generation.options import GenerationConfig
from nemo_like.policy.options import Device, Precision


class Sleeps(Enum):
    """Whether an engine gives its device's memory to the policy, and what happens to its weights then."""

    never = "never"
    keeping_weights = "keeping_weights"  # they are kept in host memory
    losing_weights = "losing_weights"  # a transfer must bring weights before it generates again


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """What an engine must know at its start of the adapters that weight transfers will bring."""

    rank: int
    target_modules: tuple[str, ...]  # last parts of the layers' names; (): every layer that vLLM can adapt


@dataclass(frozen=True, slots=True)
class EngineNode:
    """One of several nodes of an engine, and the address and port where the workers on all of them meet."""

    rank: int  # 0: the node of the engine itself
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine as a run needs it. A field that is left out asks for nothing."""

    model_name: str  # a directory
    generation: GenerationConfig
    device: Device
    precision: Precision
    max_total_sequence_length: int  # of prompt and response together, tokens
    seed: int
    # The directory of a tokenizer. Without one the engine knows token ids alone, and refuses stop strings.
    tokenizer_name: str | None = None
    # CallSampling may restrict the tokens that are sampled, for which the engine needs a tokenizer.
    structured_outputs: bool = False
    # Weight transfers bring these adapters, which the engine computes beside the checkpoint's weights.
    adapter: EngineAdapter | None = None
    # The column in which responses return the experts of their tokens; None: they return none.
    routed_experts: Column | None = None
    # How the engine takes weights while it has requests; responses then have the column policy_versions.
    weight_updates: WeightUpdates | None = None
    # An engine that sleeps needs a GPU.
    sleeps: Sleeps = Sleeps.never
