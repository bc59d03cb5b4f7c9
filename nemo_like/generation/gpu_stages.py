"""The stages of a run as a GPU sees them, and what an engine holds in each of them.

    engines start ──▶ policy starts ──▶ weight_sync ──▶ generation ──▶ logprobs ──▶ policy_training ─┐
                                             ▲                                                       │
                                             └───────────────────────────────────────────────────────┘
    with a teacher: logprobs ──▶ teacher_logprobs ──▶ policy_training
    with a critic: logprobs ──▶ values ──▶ value_training ──▶ policy_training

Engines that share GPUs with the policy start first, one after the other on each GPU: vLLM takes its share of
the GPU when it starts, and refuses to start where memory is taken or given up meanwhile. Then they sleep, and
wake only as far as a stage needs. Both the plan of the memory and the run follow this table.
"""

from __future__ import annotations

from enum import Enum


class EngineHolds(Enum):
    """What of its GPU memory an engine holds."""

    nothing = "nothing"  # asleep: what the KV cache held is lost, the weights too or they wait on the host
    weights = "weights"
    everything = "everything"  # weights and KV cache


class GpuStage(Enum):
    """A part of a run in which each process holds the same parts of its memory throughout."""

    engine_start = "engine_start"
    policy_start = "policy_start"  # and that of critic and teacher
    weight_sync = "weight_sync"
    generation = "generation"  # also scoring by engines, and validation
    logprobs = "logprobs"
    teacher_logprobs = "teacher_logprobs"
    values = "values"
    value_training = "value_training"  # also the critic's checkpoints
    policy_training = "policy_training"  # also the policy's checkpoints, and exports


ENGINE_HOLDS = {
    GpuStage.engine_start: EngineHolds.everything,
    GpuStage.policy_start: EngineHolds.nothing,
    # Weights are overwritten before the KV cache wakes, while the trainer still holds what it sends.
    GpuStage.weight_sync: EngineHolds.weights,
    GpuStage.generation: EngineHolds.everything,
    GpuStage.logprobs: EngineHolds.nothing,
    GpuStage.teacher_logprobs: EngineHolds.nothing,
    GpuStage.values: EngineHolds.nothing,
    GpuStage.value_training: EngineHolds.nothing,
    GpuStage.policy_training: EngineHolds.nothing,
}
