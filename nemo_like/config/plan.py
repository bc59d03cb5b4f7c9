"""The plan of a run: the processes, rows, micro-batches and bytes that follow from a configuration.

``roles`` is the one place that says how many processes a run has and what each asks Ray for; the
start-up code, the validation and ``--dry-run`` all read it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from nemo_like.config.adapter_layers import num_adapter_parameters
from nemo_like.config.derived import (
    dynamic_length_multiple,
    length_multiple,
    policy_world_size,
    scores_prev_logprobs,
    shares_gpus,
)
from nemo_like.config.model_info import ModelInfo
from nemo_like.config.schema import Config, Device, PolicyBackend, PolicyConfig, Precision, StorageBackend
from nemo_like.config.tasks import used_environments
from nemo_like.config.units import format_size

# The shares of a GPU that a policy worker and an engine ask Ray for when they share one: both fit on it, and
# no second worker or engine beside them.
_WORKER_SHARE, _ENGINE_SHARE = 0.75, 0.25


class Role(Enum):
    """The kinds of processes of a run."""

    driver = "driver"
    data_plane_host = "data-plane host"
    controller = "TransferQueue controller"
    storage_unit = "TransferQueue storage unit"
    rollout = "rollout actor"
    environment = "environment actor"
    engine = "vLLM engine"
    policy_worker = "policy worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeeds:
    """How many processes play a role, and the logical Ray resources that each of them asks for."""

    count: int
    num_cpus: float
    num_gpus: float = 0.0


def roles(cfg: Config) -> dict[Role, RoleNeeds]:
    """Return how many processes of each role a run has and what each asks Ray for.

    Roles are in the order in which data passes them. A replay has no engines and no environments; a run that
    only generates has no policy workers.
    """
    on_gpu, generates = cfg.policy.device is Device.cuda, cfg.rollout.replay is None
    engine_tp = cfg.generation.vllm_cfg.tensor_parallel_size
    num_units = 0 if cfg.data_plane.backend is StorageBackend.in_memory else cfg.data_plane.num_storage_units
    worker_share, engine_share = (_WORKER_SHARE, _ENGINE_SHARE) if shares_gpus(cfg) else (1.0, 1.0)
    return {
        Role.driver: RoleNeeds(count=1, num_cpus=0),
        Role.data_plane_host: RoleNeeds(count=1, num_cpus=0),
        # TransferQueue itself asks for one CPU for its controller and for each storage unit.
        Role.controller: RoleNeeds(count=min(num_units, 1), num_cpus=1),
        Role.storage_unit: RoleNeeds(count=num_units, num_cpus=1),
        Role.rollout: RoleNeeds(count=1, num_cpus=0),
        Role.environment: RoleNeeds(
            count=sum(env.num_actors for env in used_environments(cfg).values()) if generates else 0,
            num_cpus=0.1,
        ),
        Role.engine: RoleNeeds(
            count=cfg.generation.num_engines if generates else 0,
            num_cpus=engine_tp,
            num_gpus=engine_tp * engine_share if on_gpu else 0,
        ),
        Role.policy_worker: RoleNeeds(
            count=0 if cfg.rollout.generate_only else policy_world_size(cfg.policy),
            num_cpus=1,
            num_gpus=worker_share if on_gpu else 0,
        ),
    }


def ray_cpus(cfg: Config) -> int:
    """Return the logical CPUs that all actors together ask for; with fewer, Ray would wait without end."""
    return math.ceil(round(sum(needs.count * needs.num_cpus for needs in roles(cfg).values()), 6))


def ray_gpus(cfg: Config) -> int:
    """Return the GPUs that all actors together ask for."""
    return math.ceil(sum(needs.count * needs.num_gpus for needs in roles(cfg).values()))


def updates_per_step(cfg: Config) -> int:
    """Return the number of updates in one step, over all epochs."""
    num_samples = cfg.grpo.num_prompts_per_step * cfg.grpo.num_generations_per_prompt
    return num_samples // cfg.policy.train_global_batch_size * cfg.grpo.num_epochs_per_rollout


def weight_bytes(cfg: Config, model: ModelInfo) -> int:
    """Return the bytes of one copy of the weights, as an engine or an export gets it."""
    return _weight_bytes(cfg.policy, model)


def checkpoint_bytes(policy: PolicyConfig, model: ModelInfo) -> int:
    """Estimate the bytes of a checkpoint: what trains and, in float32, master weights and two moments.

    What trains is the weights, or with LoRA the adapters, which are in float32. It is not stored besides the
    master weights with FSDP, and in float32 with an optimizer that is not distributed.
    """
    if policy.lora.enabled:
        num_trained, is_float32 = num_adapter_parameters(model, policy.lora), True
        trained_bytes = 4 * num_trained
    else:
        num_trained, is_float32 = model.num_parameters, policy.precision is Precision.float32
        trained_bytes = _weight_bytes(policy, model)
    is_fsdp = policy.backend is PolicyBackend.fsdp
    if is_fsdp or (is_float32 and not policy.megatron_cfg.use_distributed_optimizer):
        return 12 * num_trained
    return 12 * num_trained + trained_bytes


def _weight_bytes(policy: PolicyConfig, model: ModelInfo) -> int:
    return model.num_parameters * (4 if policy.precision is Precision.float32 else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers that ``--dry-run`` prints."""

    roles: dict[Role, RoleNeeds]
    num_cpus: int
    num_gpus: int
    layout: str
    num_prompts: int
    num_generations: int
    num_samples: int  # rows per step
    num_steps: int
    updates_per_step: int
    train_micro_batch: str  # its size, in words
    logprob_micro_batch: str  # its size, in words
    micro_batches_per_update: int  # on each data-parallel rank; with a token budget, an upper bound
    logprob_phases: int  # how many of prev_logprobs and reference_logprobs are computed
    logprob_batches_per_phase: int  # on each data-parallel rank; with a token budget, an upper bound
    max_tokens_per_step: int
    bytes_per_token: int  # over all per_token columns
    num_parameters: int
    weight_bytes: int  # one copy, as it travels to an engine
    num_engines: int

    @property
    def data_plane_bytes_per_step(self) -> int:
        """The most bytes that a step can put into the data plane's per_token columns: all samples at their
        longest."""
        return self.bytes_per_token * self.max_tokens_per_step


def make_plan(cfg: Config, model: ModelInfo, bytes_per_token: int) -> Plan:
    """Return the plan of a valid configuration; ``bytes_per_token`` is the sum over all per_token columns."""
    grpo, policy = cfg.grpo, cfg.policy
    num_samples = grpo.num_prompts_per_step * grpo.num_generations_per_prompt
    rows_per_rank = num_samples // policy.data_parallel_size
    update_rows_per_rank = policy.train_global_batch_size // policy.data_parallel_size
    train, logprob = _micro_batches(policy)
    return Plan(
        roles=roles(cfg),
        num_cpus=ray_cpus(cfg),
        num_gpus=ray_gpus(cfg),
        layout=_layout(policy),
        num_prompts=grpo.num_prompts_per_step,
        num_generations=grpo.num_generations_per_prompt,
        num_samples=num_samples,
        num_steps=grpo.max_num_steps,
        updates_per_step=updates_per_step(cfg),
        train_micro_batch=train.size,
        logprob_micro_batch=logprob.size,
        micro_batches_per_update=math.ceil(update_rows_per_rank / train.num_samples),
        logprob_phases=scores_prev_logprobs(cfg.loss_fn) + (cfg.loss_fn.reference_policy_kl_penalty > 0),
        logprob_batches_per_phase=math.ceil(rows_per_rank / logprob.num_samples),
        max_tokens_per_step=num_samples * policy.max_total_sequence_length,
        bytes_per_token=bytes_per_token,
        num_parameters=model.num_parameters,
        weight_bytes=weight_bytes(cfg, model),
        num_engines=cfg.generation.num_engines,
    )


@dataclass(frozen=True, slots=True)
class _MicroBatches:
    size: str
    num_samples: int  # of one micro-batch; with a token budget, when all are at their longest


def _micro_batches(policy: PolicyConfig) -> tuple[_MicroBatches, _MicroBatches]:
    """Return the micro-batches of training and those of the log-prob phases."""
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    if not packing.enabled and not dynamic.enabled:
        sizes = policy.train_micro_batch_size, policy.logprob_batch_size
        train, logprob = (_MicroBatches(f"{size} samples", size) for size in sizes)
        return train, logprob
    packed = "packed, prompts shared" if packing.share_prompts else "packed"
    kind, budgets, multiple = (
        (packed, packing, length_multiple(policy))
        if packing.enabled
        else ("dynamic", dynamic, dynamic_length_multiple(policy))
    )
    longest = math.ceil(policy.max_total_sequence_length / multiple) * multiple
    train, logprob = (
        _MicroBatches(f"up to {tokens:,} tokens, {kind}", max(1, tokens // longest))
        for tokens in (budgets.train_mb_tokens, budgets.logprob_mb_tokens)
    )
    return train, logprob


def _layout(policy: PolicyConfig) -> str:
    """Return the sizes of the axes in words: "TP2 x PP1 x DP4" or "FSDP TP2 x DP4, LoRA of rank 16"."""
    adapters = f", LoRA of rank {policy.lora.rank}" if policy.lora.enabled else ""
    if policy.backend is PolicyBackend.fsdp:
        tensor_size = policy.fsdp_cfg.tensor_parallel_size
        return f"FSDP TP{tensor_size} x DP{policy.data_parallel_size}{adapters}"
    megatron = policy.megatron_cfg
    contexts, experts = megatron.context_parallel_size, megatron.expert_model_parallel_size
    sizes = [
        f"TP{megatron.tensor_model_parallel_size}",
        *([f"CP{contexts}"] if contexts > 1 else []),
        f"PP{megatron.pipeline_model_parallel_size}",
        f"DP{policy.data_parallel_size}",
    ]
    return " x ".join(sizes) + (f", experts over {experts}" if experts > 1 else "") + adapters


def format_plan(plan: Plan) -> str:
    """Return the plan as text for a terminal: a table of processes and a few lines."""
    lines = [f"{'processes':<28}{'count':>6}{'CPUs each':>11}{'GPUs each':>11}"]
    lines += [
        f"  {role.value:<26}{needs.count:>6}{needs.num_cpus:>11g}{needs.num_gpus:>11g}"
        for role, needs in plan.roles.items()
    ]
    lines += [
        f"  {'asked of Ray in all':<26}{'':>6}{plan.num_cpus:>11}{plan.num_gpus:>11}",
        "",
        f"model        {plan.num_parameters:,} parameters, policy {plan.layout}",
        f"step         {plan.num_prompts:,} prompts x {plan.num_generations} responses = "
        f"{plan.num_samples:,} rows; {plan.num_steps:,} steps",
        f"training     {plan.updates_per_step} updates per step, "
        f"at most {plan.micro_batches_per_update} micro-batches ({plan.train_micro_batch}) "
        "per update on each data-parallel rank",
        f"log-probs    {_phases(plan)}",
        f"data plane   at most {format_size(plan.data_plane_bytes_per_step)} per step "
        f"({plan.max_tokens_per_step:,} tokens x {plan.bytes_per_token} bytes)",
        f"weight sync  {format_size(plan.weight_bytes)} per step to each of {plan.num_engines} engines",
    ]
    return "\n".join(lines)


def _phases(plan: Plan) -> str:
    if not plan.logprob_phases:
        return "none are computed before training"
    return (
        f"{'twice ' * (plan.logprob_phases - 1)}at most {plan.logprob_batches_per_phase} forwards "
        f"({plan.logprob_micro_batch}) per step on each data-parallel rank"
    )
