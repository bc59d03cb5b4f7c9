"""The plan of a run, which ``--dry-run`` prints: its processes and places, rows, micro-batches and bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_like.algorithms.loss_traits import scores_prev_logprobs
from nemo_like.algorithms.options import StepShape
from nemo_like.checkpoint.options import CheckpointingConfig
from nemo_like.config.units import format_size
from nemo_like.configuration import Config
from nemo_like.models.adapter_layers import num_adapter_parameters
from nemo_like.models.end_tokens import shown_end_tokens
from nemo_like.models.model_arithmetic import value_bytes
from nemo_like.models.model_info import ModelInfo
from nemo_like.plan.host_memory import HostMemory, format_host_memory, host_memory
from nemo_like.plan.memory_timetable import (
    MemoryTimetable,
    format_timetable,
    gpu_bytes,
    memory_timetable,
)
from nemo_like.plan.places import Place, gpus_by_node, placement
from nemo_like.plan.roles import Role, RoleNeeds, ray_cpus, roles
from nemo_like.plan.run_models import RunModels
from nemo_like.policy.backends.backend_kind import axis_size, backend_kind_of
from nemo_like.policy.groups.layout import (
    adapters_of,
    dynamic_length_multiple,
    is_one_engine,
    length_multiple,
    spared_moments,
    uses_muon,
)
from nemo_like.policy.options import (
    PolicyConfig,
    TrainedGroupConfig,
    ValueConfig,
    WorkerGroupConfig,
)


def updates_per_step(cfg: Config) -> int:
    """Return the number of updates of the policy in one step, over all epochs."""
    return _updates_per_step(cfg, cfg.policy, cfg.grpo.num_epochs_per_rollout)


def _updates_per_step(cfg: Config, group: TrainedGroupConfig, num_epochs: int) -> int:
    num_samples = cfg.grpo.num_samples_per_step
    return num_samples // group.train_global_batch_size * num_epochs


def weight_bytes(cfg: Config, model: ModelInfo) -> int:
    """Return the bytes of one copy of the weights, as an engine or an export gets it."""
    return _weight_bytes(cfg.policy, model)


def checkpoint_bytes(policy: TrainedGroupConfig, model: ModelInfo) -> int:
    """Estimate the bytes of a checkpoint: the trained parameters, and in float32 their master weights and two
    moments, or Muon's momentum.

    With LoRA the trained parameters are the adapters, in float32; else they are the weights. Some backends
    store only the master weights.
    """
    lora, num_trained, trained_bytes = adapters_of(policy), model.num_parameters, _weight_bytes(policy, model)
    if lora is not None:
        num_trained = num_adapter_parameters(model, lora)
        trained_bytes = 4 * num_trained
    stores_weights = backend_kind_of(policy).stores_weights
    is_stored = stores_weights is not None and stores_weights(policy)
    moments = 8 * num_trained - spared_moments(policy, model.parameters.layer_matrices)
    return 4 * num_trained + moments + trained_bytes * is_stored


def _weight_bytes(policy: WorkerGroupConfig, model: ModelInfo) -> int:
    return model.num_parameters * value_bytes(policy.precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """The numbers of one worker group."""

    num_parameters: int
    layout: str
    scoring_micro_batch: str  # its size, in words; scoring computes log-probs or values without gradients
    forwards_per_phase: int  # on each data-parallel rank; with a token budget, an upper bound


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedGroupPlan(GroupPlan):
    """The numbers of one worker group that trains."""

    updates_per_step: int
    train_micro_batch: str  # its size, in words
    micro_batches_per_update: int  # on each data-parallel rank; with a token budget, an upper bound
    muon: str  # where Muon's momentum is, in words; empty with AdamW


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The numbers that ``--dry-run`` prints."""

    roles: dict[Role, RoleNeeds]
    num_cpus: int
    places: list[Place]
    memory: MemoryTimetable
    host_memory: HostMemory
    step_shape: StepShape
    num_steps: int
    start: str | None  # what the run takes of another run's checkpoint
    code: str | None  # which code of others its processes run
    policy: TrainedGroupPlan
    logprob_phases: int  # how many of prev_logprobs and reference_logprobs are computed
    critic: TrainedGroupPlan | None
    teacher: GroupPlan | None
    has_teaching_engine: bool  # a vLLM engine scores for the teacher
    critic_warmup_steps: int
    end_tokens: Sequence[str] | None  # tokens that end a response; None when the checkpoint is not here
    max_tokens_per_step: int
    bytes_per_token: int  # over all per_token columns
    weight_bytes: int  # one copy, as an engine gets it
    num_engines: int

    @property
    def data_plane_bytes_per_step(self) -> int:
        """The most bytes that a step puts into per_token columns of the data plane: all samples longest."""
        return self.bytes_per_token * self.max_tokens_per_step


def make_plan(cfg: Config, models: RunModels, bytes_per_token: int) -> Plan:
    """Return the plan of a valid configuration, whose worker groups hold ``models``.

    ``bytes_per_token`` is the sum over all per_token columns.
    """
    grpo, policy, value, teacher = cfg.grpo, cfg.policy, cfg.value, cfg.teacher
    model = models[Role.policy_worker]
    of_critic, of_teacher = None, None
    if value is not None and (critic := models.get(Role.value_worker)) is not None:
        of_critic = _trained_group_plan(cfg, value, critic, value.num_epochs_per_rollout)
    if teacher is not None and (taught_by := models.get(Role.teacher_worker)) is not None:
        of_teacher = _group_plan(cfg, teacher, taught_by)
    return Plan(
        roles=roles(cfg),
        num_cpus=ray_cpus(cfg),
        places=placement(cfg),
        memory=memory_timetable(cfg, models, gpu_bytes(cfg)),
        host_memory=host_memory(cfg, models),
        step_shape=grpo.step_shape,
        num_steps=grpo.max_num_steps,
        start=_start(cfg.checkpointing),
        code=_code(policy),
        policy=_trained_group_plan(cfg, policy, model, grpo.num_epochs_per_rollout),
        logprob_phases=scores_prev_logprobs(cfg.loss_fn) + (cfg.loss_fn.reference_policy_kl_penalty > 0),
        critic=of_critic,
        teacher=of_teacher,
        has_teaching_engine=teacher is not None and is_one_engine(teacher),
        critic_warmup_steps=0 if value is None else value.warmup_steps,
        end_tokens=shown_end_tokens(Path(policy.model_name)) if Path(policy.model_name).is_dir() else None,
        max_tokens_per_step=grpo.rollout_shape.num_samples * policy.max_total_sequence_length,
        bytes_per_token=bytes_per_token,
        weight_bytes=weight_bytes(cfg, model),
        num_engines=cfg.generation.num_engines,
    )


def _group_plan(cfg: Config, group: WorkerGroupConfig, model: ModelInfo) -> GroupPlan:
    """Return the plan of a worker group. A critic scores samples without sharing their prompts."""
    scoring = _scoring_micro_batches(group)
    rows_per_rank = cfg.grpo.num_samples_per_step // group.data_parallel_size
    return GroupPlan(
        num_parameters=model.num_parameters,
        layout=_layout(group),
        scoring_micro_batch=scoring.size.removesuffix(_SHARED)
        if isinstance(group, ValueConfig)
        else scoring.size,
        forwards_per_phase=math.ceil(rows_per_rank / scoring.num_samples),
    )


def _trained_group_plan(
    cfg: Config, group: TrainedGroupConfig, model: ModelInfo, num_epochs: int
) -> TrainedGroupPlan:
    train, scored = _train_micro_batches(group), _group_plan(cfg, group, model)
    update_rows_per_rank = group.train_global_batch_size // group.data_parallel_size
    return TrainedGroupPlan(
        num_parameters=scored.num_parameters,
        layout=scored.layout,
        scoring_micro_batch=scored.scoring_micro_batch,
        forwards_per_phase=scored.forwards_per_phase,
        updates_per_step=_updates_per_step(cfg, group, num_epochs),
        train_micro_batch=train.size,
        micro_batches_per_update=math.ceil(update_rows_per_rank / train.num_samples),
        muon=_muon(group),
    )


def _muon(group: TrainedGroupConfig) -> str:
    if not uses_muon(group):
        return ""
    # A key that would spread the state is refused with Muon; without such a key it always is spread.
    is_whole = bool(backend_kind_of(group).optimizer_sharding)
    return f"; Muon, whose momentum is {'whole on each of them' if is_whole else 'spread over them'}"


_SHARED = ", prompts shared"


@dataclass(frozen=True, slots=True)
class _MicroBatches:
    size: str
    num_samples: int  # in one micro-batch; with a token budget, when all samples are longest


def _train_micro_batches(group: TrainedGroupConfig) -> _MicroBatches:
    if group.sequence_packing.enabled:
        return _budgeted(group, group.sequence_packing.train_mb_tokens)
    if group.dynamic_batching.enabled:
        return _budgeted(group, group.dynamic_batching.train_mb_tokens)
    return _of_samples(group.train_micro_batch_size)


def _scoring_micro_batches(group: WorkerGroupConfig) -> _MicroBatches:
    if group.sequence_packing.enabled:
        return _budgeted(group, group.sequence_packing.logprob_mb_tokens)
    if group.dynamic_batching.enabled:
        return _budgeted(group, group.dynamic_batching.logprob_mb_tokens)
    return _of_samples(group.logprob_batch_size)


def _of_samples(count: int) -> _MicroBatches:
    return _MicroBatches(f"{count} samples", count)


def _budgeted(group: WorkerGroupConfig, num_tokens: int) -> _MicroBatches:
    """Return the micro-batches of a token budget of ``num_tokens``."""
    kind, multiple = "dynamic", dynamic_length_multiple(group)
    if group.sequence_packing.enabled:
        kind, multiple = "packed", length_multiple(group)
        kind += _SHARED * group.sequence_packing.share_prompts
    longest = math.ceil(group.max_total_sequence_length / multiple) * multiple
    return _MicroBatches(f"up to {num_tokens:,} tokens, {kind}", max(1, num_tokens // longest))


def _layout(policy: WorkerGroupConfig) -> str:
    """Return the sizes of the axes, such as "TP2 x PP1 x DP4" or "FSDP TP2 x DP4, LoRA of rank 16"."""
    lora = adapters_of(policy)
    adapters = "" if lora is None else f", LoRA of rank {lora.rank}"
    kind, experts = backend_kind_of(policy), axis_size(policy, "ep") * axis_size(policy, "etp")
    contexts, stages = axis_size(policy, "cp"), axis_size(policy, "pp")
    sizes = [
        f"TP{axis_size(policy, 'tp')}",
        *([f"CP{contexts}"] if contexts > 1 else []),
        *([f"PP{stages}"] if kind.has_stages else []),
        f"DP{policy.data_parallel_size}",
    ]
    spread = f", experts over {experts}" if experts > 1 else ""
    return kind.layout_prefix + " x ".join(sizes) + spread + adapters


def process_table(roles: Mapping[Role, RoleNeeds], num_cpus: int, num_gpus: int) -> list[str]:
    """Return a table of the processes; its last line has the CPUs and GPUs reserved for all of them."""
    lines = [f"{'processes':<28}{'count':>6}{'CPUs each':>11}{'GPUs each':>11}"]
    lines += [
        f"  {role.value:<26}{needs.count:>6}{needs.num_cpus:>11g}{needs.num_gpus:>11g}"
        for role, needs in roles.items()
    ]
    return [*lines, f"  {'reserved in all':<26}{'':>6}{num_cpus:>11}{num_gpus:>11}"]


def format_plan(plan: Plan) -> str:
    """Return the plan as text for a terminal: a table of processes and a few lines."""
    shape = plan.step_shape
    lines = [
        *process_table(plan.roles, plan.num_cpus, sum(gpus_by_node(plan.places).values())),
        "",
        f"model        {plan.policy.num_parameters:,} parameters, policy {plan.policy.layout}",
        f"step         {shape.num_prompts:,} prompts x {shape.num_generations} responses = "
        f"{shape.num_samples:,} rows; {plan.num_steps:,} steps",
        *([] if plan.start is None else [f"start        {plan.start}"]),
        *([] if plan.code is None else [f"code         {plan.code}"]),
        f"responses    {_ends(plan.end_tokens)}",
        f"training     {_updates(plan.policy)}",
        f"log-probs    {_phases(plan)}",
        *_critic_lines(plan),
        *_teacher_lines(plan),
        f"data plane   at most {format_size(plan.data_plane_bytes_per_step)} per step "
        f"({plan.max_tokens_per_step:,} tokens x {plan.bytes_per_token} bytes)",
        f"weight sync  {format_size(plan.weight_bytes)} per step to each of {plan.num_engines} engines",
        *_engines_over_nodes(plan.places),
        *format_host_memory(plan.host_memory),
        *format_timetable(plan.memory),
    ]
    return "\n".join(lines)


def _start(checkpointing: CheckpointingConfig) -> str | None:
    if (path := checkpointing.resume_from_path) is None:
        return None
    return f"takes of {path} {checkpointing.resume_parts.about}; once it has checkpoints, it continues these"


def _code(policy: PolicyConfig) -> str | None:
    parts = [f"imported first: {', '.join(policy.external_lib)}"] if policy.external_lib else []
    if policy.trust_remote_code:
        parts.append("Python files of the checkpoints run with all your rights, so read them first")
    return "; ".join(parts) or None


def _engines_over_nodes(places: Sequence[Place]) -> list[str]:
    """Return a line for each node of every engine that is spread over several."""
    spread = [place for place in places if place.role in (Role.engine, Role.engine_part)]
    if not any(place.role is Role.engine_part for place in spread):
        return []
    gpus = {place: f" GPUs {', '.join(map(str, place.gpus))}" if place.gpus else "" for place in spread}
    return ["engines", *(f"  {place.actor:<26}node {place.node}{gpus[place]}" for place in spread)]


def _ends(tokens: Sequence[str] | None) -> str:
    if tokens is None:
        return "end at the eos tokens of the checkpoint, which is not here"
    return f"end at {', '.join(tokens)}"


def _phases(plan: Plan) -> str:
    if not plan.logprob_phases:
        return "none are computed before training"
    return f"{'twice ' * (plan.logprob_phases - 1)}{_forwards(plan.policy)}"


def _updates(group: TrainedGroupPlan) -> str:
    return (
        f"{group.updates_per_step} updates per step, at most {group.micro_batches_per_update} micro-batches "
        f"({group.train_micro_batch}) per update on each data-parallel rank{group.muon}"
    )


def _forwards(group: GroupPlan) -> str:
    return (
        f"at most {group.forwards_per_phase} forwards ({group.scoring_micro_batch}) per step on each "
        "data-parallel rank"
    )


def _critic_lines(plan: Plan) -> list[str]:
    if plan.critic is None:
        return []
    steps = plan.critic_warmup_steps
    alone = f"; it trains alone in the first {steps:,} steps" if steps else ""
    return [
        f"critic       {plan.critic.num_parameters:,} parameters, {plan.critic.layout}{alone}",
        f"  values     {_forwards(plan.critic)}",
        f"  training   {_updates(plan.critic)}",
    ]


def _teacher_lines(plan: Plan) -> list[str]:
    if plan.teacher is None:
        return []
    size = f"teacher      {plan.teacher.num_parameters:,} parameters"
    if plan.has_teaching_engine:
        return [f"{size}, scored by one vLLM engine"]
    return [f"{size}, {plan.teacher.layout}", f"  log-probs  {_forwards(plan.teacher)}"]
