"""The matrix of whole runs: groups of short runs that differ in nothing but how they are spread.

Each group has a plain run, of one policy worker and one engine, which records what it samples. The group's
other runs replay that, or sample by themselves, and are compared with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.functional.runs import CONFIG, FinishedRun, run_grpo

NUM_STEPS = 3
TOLERANCE = 1e-4
MIXTURE_CONFIG = "configs/grpo_arithmetic_moe_cpu.yaml"
IMAGE_CONFIG = "configs/grpo_shapes_vlm_cpu.yaml"
SMALL = (
    f"grpo.max_num_steps={NUM_STEPS}",
    "grpo.num_prompts_per_step=16",
    "grpo.num_generations_per_prompt=4",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    "policy.data_parallel_size=1",
    "policy.train_global_batch_size=32",  # two updates a step
    "policy.optimizer.lr=2.0e-4",
    # Adam divides gradients that are zero but for rounding by little more than this.
    "policy.optimizer.adam_eps=1.0e-5",
    "policy.scheduler.warmup_updates=0",
    "policy.scheduler.decay_style=constant",
    "generation.num_engines=1",
    "checkpointing.enabled=false",
    "logger.wandb.mode=disabled",
)


def judged_by(environment: str, function: str = "varied") -> tuple[str, ...]:
    """Arguments that have one of the matrix's own functions judge."""
    options = f"{{function: 'tests.functional.matrix_rewards:{function}', arguments: {{}}}}"
    return (f"env.{environment}.kind=function", f"++env.{environment}.options={options}")


PADDED = ("policy.sequence_packing.enabled=false", "policy.sequence_packing.share_prompts=false")
PACKED = ("policy.sequence_packing.share_prompts=false",)
DYNAMIC = (
    *PADDED,
    "policy.dynamic_batching.enabled=true",
    "policy.dynamic_batching.train_mb_tokens=256",
    "policy.dynamic_batching.logprob_mb_tokens=512",
    "policy.dynamic_batching.sequence_length_round=4",
)
DP2 = ("policy.data_parallel_size=2",)
FSDP = ("policy.backend=fsdp",)
FSDP_TP2 = (*FSDP, "policy.fsdp_cfg.tensor_parallel_size=2")
SEQUENCE_PARALLEL = ("policy.megatron_cfg.sequence_parallel=true",)


def megatron(**axes: int) -> tuple[str, ...]:
    """Arguments for sizes of Megatron-core's axes: tensor, pipeline, context, expert."""
    return tuple(f"policy.megatron_cfg.{axis}_model_parallel_size={size}" for axis, size in axes.items())


TP2, PP2, EP2 = megatron(tensor=2), megatron(pipeline=2), megatron(expert=2)
CP2 = ("policy.megatron_cfg.context_parallel_size=2", *PACKED)
EP1 = megatron(expert=1)
MOONCAKE, IN_MEMORY = ("data_plane.backend=mooncake_cpu",), ("data_plane.backend=in_memory",)


@dataclass(frozen=True)
class Spread:
    """A run of a group. ``samples``: it has engines of its own, where it otherwise replays."""

    name: str
    arguments: tuple[str, ...]
    samples: bool = False
    is_quick: bool = False


@dataclass(frozen=True)
class Group:
    """``fixture`` names the pytest fixture that makes the checkpoint, or gives further arguments."""

    name: str
    fixture: str
    spreads: tuple[Spread, ...]
    arguments: tuple[str, ...] = judged_by("arithmetic")
    config: str = CONFIG
    is_quick: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_quick", any(spread.is_quick for spread in self.spreads))


def on_every_backend(name: str, arguments: tuple[str, ...]) -> tuple[Spread, ...]:
    """The same trainer on the backends that are not the default."""
    return (
        Spread(f"{name}, Mooncake", (*arguments, *MOONCAKE)),
        Spread(f"{name}, in memory", (*arguments, *IN_MEMORY)),
    )


TEXT = Group(
    "text",
    "arithmetic_model",
    (
        Spread("DP 2", DP2),
        Spread("DP 2, distributed optimizer", (*DP2, "policy.megatron_cfg.use_distributed_optimizer=true")),
        Spread("TP 2", TP2),
        Spread("TP 2 with sequence parallelism", (*TP2, *SEQUENCE_PARALLEL)),
        Spread("PP 2", PP2),
        Spread("TP 2 x PP 2", (*TP2, *PP2)),
        Spread("CP 2", CP2),
        Spread("FSDP DP 2", (*FSDP, *DP2)),
        Spread("FSDP DP 2, in memory", (*FSDP, *DP2, *IN_MEMORY), is_quick=True),
        Spread("FSDP DP 2, Mooncake", (*FSDP, *DP2, *MOONCAKE)),
        Spread("FSDP TP 2", FSDP_TP2),
        Spread("fixed micro-batches", (*DP2, *PADDED)),
        Spread("dynamic batches", (*DP2, *DYNAMIC)),
        Spread("packed", (*DP2, *PACKED)),
        Spread("prompts shared", (*DP2, "policy.sequence_packing.share_prompts=true")),
        Spread("TP 2, every rank fetches", (*TP2, "policy.replica_fetch=every_rank")),
        *on_every_backend("TP 2", TP2),
        Spread("TP 2, engines 2", (*TP2, "generation.num_engines=2"), samples=True),
        Spread("PP 2, one engine", PP2, samples=True),
        Spread("FSDP DP 2, one engine", (*FSDP, *DP2), samples=True),
        Spread("engine TP 2", ("generation.vllm_cfg.tensor_parallel_size=2",), samples=True),
        Spread("engine PP 2", ("generation.vllm_cfg.pipeline_parallel_size=2",), samples=True),
        Spread("engines 2, Mooncake", ("generation.num_engines=2", *MOONCAKE), samples=True),
        Spread("engines 2, in memory", ("generation.num_engines=2", *IN_MEMORY), samples=True),
    ),
)
# How many samples without a gradient can be left out depends on the number of data-parallel ranks, and the
# load of experts is over the samples that were computed.
OF_EXPERTS = (*judged_by("arithmetic"), *EP1, "grpo.skip_idle_samples=false")
MIXTURE = Group(
    "mixture of experts",
    "mixture_model",
    (
        Spread("EP 2", (*DP2, *EP2)),
        *on_every_backend("EP 2", (*DP2, *EP2)),
        Spread("EP 2 x TP 2", (*TP2, *SEQUENCE_PARALLEL, *EP2)),
        Spread("EP 2 x PP 2", (*DP2, *PP2, *EP2)),
        Spread("EP 2, fixed micro-batches", (*DP2, *EP2, *PADDED)),
        Spread("FSDP DP 2", (*FSDP, *DP2)),
        Spread("EP 2, one engine", (*DP2, *EP2), samples=True),
    ),
    OF_EXPERTS,
    MIXTURE_CONFIG,
)
ROUTER_REPLAY = Group(
    "router replay",
    "mixture_model",
    (
        Spread("EP 2", (*DP2, *EP2)),
        Spread("EP 2 x TP 2", (*TP2, *SEQUENCE_PARALLEL, *EP2)),
        Spread("PP 2", PP2),
        Spread("EP 2, one engine", (*DP2, *EP2), samples=True),
    ),
    (*OF_EXPERTS, "policy.megatron_cfg.router_replay=true"),
    MIXTURE_CONFIG,
)
ADAPTERS = Group(
    "LoRA",
    "arithmetic_model",
    (
        Spread("DP 2", DP2),
        Spread("TP 2", TP2),
        Spread("PP 2", PP2),
        Spread("FSDP DP 2", (*FSDP, *DP2)),
        Spread("FSDP TP 2", FSDP_TP2),
        Spread(
            "PP 2, adapters sent to engines 2",
            (*PP2, "generation.num_engines=2", "generation.lora_sync=adapter"),
            samples=True,
        ),
    ),
    (
        *judged_by("arithmetic"),
        "policy.lora.enabled=true",
        "policy.lora.rank=4",
        "policy.optimizer.lr=2.0e-3",
    ),
)
TURNS = Group(
    "two turns",
    "arithmetic_model",
    (
        Spread("DP 2", DP2),
        Spread("TP 2", TP2),
        Spread("CP 2", CP2),
        Spread("FSDP DP 2", (*FSDP, *DP2)),
        Spread("engines 2", (*DP2, "generation.num_engines=2"), samples=True),
    ),
    (*judged_by("arithmetic", "two_turns"), "env.arithmetic.max_turns=2"),
)
TASKS = Group(
    "two tasks",
    "arithmetic_model",
    (
        Spread("DP 2", DP2),
        Spread("engines 2", (*DP2, "generation.num_engines=2"), samples=True),
    ),
    (
        "+env@env.second=function",
        *judged_by("arithmetic"),
        *judged_by("second"),
        "data.train=[{name: two}, {name: one, digits: 1, env: second}]",
    ),
)
IMAGES = Group(
    "images",
    "image_task",
    (
        Spread("FSDP DP 2", DP2),
        Spread("FSDP DP 2, fixed micro-batches", (*DP2, *PADDED)),
        Spread("engines 2", (*DP2, "generation.num_engines=2"), samples=True),
    ),
    judged_by("count"),
    IMAGE_CONFIG,
)
GROUPS = (TEXT, MIXTURE, ROUTER_REPLAY, ADAPTERS, TURNS, TASKS, IMAGES)


def short_run(directory: Path, group: Group, arguments: Sequence[str]) -> FinishedRun:
    """A run of this group that ended well, with its weights exported."""
    run = run_grpo(directory, [*SMALL, *group.arguments, *arguments], config=group.config)
    assert run.returncode == 0, run.output
    return run


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(directory.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


@dataclass(frozen=True)
class Deviation:
    """How far a run is from its group's plain run: the largest relative differences."""

    loss: float
    grad_norm: float
    weights: float  # of a tensor, by norms


def deviation(run: FinishedRun, plain: FinishedRun) -> Deviation:
    of_metrics = {}
    for key in ("train/loss", "train/grad_norm"):
        got, expected = run.metrics(key), plain.metrics(key)
        assert len(got) == len(expected) == NUM_STEPS
        # A loss of nearly 0 is a sum of terms of the size of the gradient norm's: it is held to 1 instead.
        of_metrics[key] = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(got, expected, strict=True))
    mine, theirs = weights(run.run_dir / "final_hf"), weights(plain.run_dir / "final_hf")
    assert mine.keys() == theirs.keys()
    gaps = [float((mine[name] - tensor).norm() / tensor.norm()) for name, tensor in theirs.items()]
    return Deviation(of_metrics["train/loss"], of_metrics["train/grad_norm"], max(gaps))
