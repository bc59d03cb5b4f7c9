"""The stages of a run, and which of its GPU memory an engine holds during each of them.

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
    """Which part of its GPU memory an engine holds."""

    nothing = "nothing"  # asleep: the KV cache is lost; the weights too, or they wait on the host
    weights = "weights"
    everything = "everything"  # weights and KV cache


class Stage(Enum):
    """A part of a run, with its title in the memory plan, and what an engine that shares its GPU with the
    policy holds meanwhile. The key of the same name in cluster.stage_timeouts_s is its deadline."""

    engine_start = "engines", EngineHolds.everything  # without a deadline
    policy_start = "policy", EngineHolds.nothing  # the start of critic and teacher too; without a deadline
    # Weights are overwritten before the KV cache wakes, while the trainer still holds what it sends.
    weight_sync = "sync", EngineHolds.weights
    generation = "generate", EngineHolds.everything  # also scoring by engines
    logprobs = "logprobs", EngineHolds.nothing
    teacher_logprobs = "teacher", EngineHolds.nothing
    values = "values", EngineHolds.nothing
    value_training = "critic", EngineHolds.nothing
    policy_training = "train", EngineHolds.nothing
    checkpoint = "checkpoint", EngineHolds.nothing  # in the training of its group, as exports are
    validation = "validation", EngineHolds.everything  # in generation

    def __init__(self, title: str, engine_holds: EngineHolds) -> None:
        self.title = title
        self.engine_holds = engine_holds


# In each of these stages a process holds the same parts of its GPU memory throughout; the other two stages
# happen inside these.
GPU_STAGES = tuple(stage for stage in Stage if stage not in (Stage.checkpoint, Stage.validation))
