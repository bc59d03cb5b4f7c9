"""Rules on the updates of a worker group that trains: their size, and their learning rates."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.config.problems import Problem
from nemo_like.policy.groups.layout import adapters_of, uses_muon
from nemo_like.policy.options import LRDecayStyle, TrainedGroupConfig


def batch_problems(name: str, group: TrainedGroupConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield a problem unless a step is a whole number of updates and an update divides evenly over the
    ranks."""
    prompts, size = grpo.num_prompts_per_step, grpo.num_generations_per_prompt
    batch, ranks = group.train_global_batch_size, group.data_parallel_size
    num_samples = grpo.num_samples_per_step
    if num_samples % batch == 0 and batch % ranks == 0:
        return
    valid = [size for size in range(ranks, num_samples + 1, ranks) if num_samples % size == 0]
    if valid:
        remedy = f"try {_nearest(valid, batch)}"
    else:
        fitting = [count for count in range(1, prompts + ranks + 1) if count * size % ranks == 0]
        remedy = f"N is no multiple of {ranks}: try grpo.num_prompts_per_step={_nearest(fitting, prompts)}"
    yield Problem(
        key=f"{name}.train_global_batch_size={batch}",
        rule=(
            f"must divide the N = {prompts} prompts x {size} generations = {num_samples} samples of a step "
            f"and be a multiple of {name}.data_parallel_size={ranks}"
        ),
        remedy=remedy,
    )


def learning_rate_problems(name: str, group: TrainedGroupConfig, total: int) -> Iterator[Problem]:
    """Yield every problem of a group's learning-rate schedule in a run of ``total`` updates."""
    scheduler, lr = group.scheduler, group.optimizer.lr
    if scheduler.decay_style is LRDecayStyle.constant:
        return
    if scheduler.min_lr > lr:
        rule = f"must be at most {name}.optimizer.lr={lr:g}"
        yield Problem(key=f"{name}.scheduler.min_lr={scheduler.min_lr:g}", rule=rule, remedy="")
    key = f"{name}.scheduler.decay_updates={scheduler.decay_updates}"
    if scheduler.decay_updates <= scheduler.warmup_updates:
        yield Problem(
            key=key,
            rule=f"must be above warmup_updates={scheduler.warmup_updates}, which it includes",
            remedy=f"the run makes {total} updates",
        )
    elif scheduler.min_lr == 0 and scheduler.decay_updates < total:
        yield Problem(
            key=key,
            rule=f"reaches a learning rate of 0 before the last of {total} updates",
            remedy=(
                f"set it to {total}, or to ${{updates_of_run:{name}}}, which follows grpo.max_num_steps; or "
                f"{name}.scheduler.min_lr above 0"
            ),
        )


def loss_scaling_problems(name: str, group: TrainedGroupConfig) -> Iterator[Problem]:
    """Yield a problem where the loss of float16 would begin with a scale below its minimum."""
    scaling = group.loss_scaling
    if scaling.initial_loss_scale < scaling.min_loss_scale:
        yield Problem(
            key=f"{name}.loss_scaling.initial_loss_scale={scaling.initial_loss_scale:g}",
            rule=f"must be at least {name}.loss_scaling.min_loss_scale={scaling.min_loss_scale:g}",
            remedy="65536 is usual",
        )


def muon_problems(name: str, group: TrainedGroupConfig) -> Iterator[Problem]:
    """Yield a problem where no matrix of a layer would train, as Muon needs."""
    if uses_muon(group) and adapters_of(group) is not None:
        yield Problem(
            key=f"{name}.optimizer.kind=muon",
            rule=f"is not for {name}.lora.enabled=true: Muon moves whole matrices of layers, and adapters "
            "are factors of their changes",
            remedy="set it to adamw",
        )


def _nearest(values: list[int], wanted: int) -> str:
    """Return the values next to ``wanted`` on either side, as "4 or 8"."""
    below = [value for value in values if value < wanted]
    above = [value for value in values if value > wanted]
    return " or ".join(str(value) for value in below[-1:] + above[:1])
