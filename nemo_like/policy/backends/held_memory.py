"""The memory that a worker holds for a model and its training, in bytes; each training backend computes its
own."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.policy.options import Precision, WorkerGroupConfig

FLOAT32 = 4
MOMENTS = 2 * FLOAT32  # Adam's, per trained parameter


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
