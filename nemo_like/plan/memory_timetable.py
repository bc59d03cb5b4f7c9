"""Plans which process holds how many bytes of which GPU in each stage of a run, and whether they fit.

``--dry-run`` prints the plan; the rules and the start of a run check it against the size of the GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nemo_like.cluster.options import Placement
from nemo_like.cluster.stage import GPU_STAGES, EngineHolds, Stage
from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import reward_model
from nemo_like.generation.speculation import draft_bytes
from nemo_like.models.model_arithmetic import kv_bytes_per_token, value_bytes
from nemo_like.models.model_info import ModelInfo, count_stored_scalars
from nemo_like.plan.derived import shares_gpus
from nemo_like.plan.places import Place, placement, reward_models
from nemo_like.plan.policy_memory import PolicyMemory, layer_bytes, policy_memory
from nemo_like.plan.roles import Role, worker_groups
from nemo_like.plan.run_models import RunModels
from nemo_like.policy.backends.backend_kind import backend_kind_of
from nemo_like.policy.groups.layout import is_one_engine, parks_optimizer, recomputes_layers, uses_muon
from nemo_like.policy.groups.parallelism import shards_optimizer
from nemo_like.policy.options import Device, WorkerGroupConfig

GIB = 2**30
# CUDA's context and kernels, and memory that PyTorch's allocator cannot use, of each process. It is an
# assumption; a sleeping engine had 0.8 GiB on an H200.
CONTEXT_BYTES = GIB
# The same of a training worker, with NCCL's buffers and cuBLAS's work space. One had 2.2 GiB on an H200.
WORKER_CONTEXT_BYTES = 2 * GIB
# CUDA graphs of an engine, which wait in host memory while it sleeps. It is an assumption.
GRAPH_BYTES = GIB

Gpu = tuple[int, int]  # node, index of the GPU on it


@dataclass(frozen=True, slots=True)
class GpuMemoryUse:
    """The bytes of a GPU that one process uses for one purpose, such as policy_worker-0 for its weights."""

    actor: str
    role: Role
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryTimetable:
    """The memory that processes hold on every GPU of a run, by stage; empty on CPUs."""

    by_gpu: Mapping[Gpu, Mapping[Stage, tuple[GpuMemoryUse, ...]]]

    def bytes_in(self, gpu: Gpu, stage: Stage) -> int:
        return sum(one.num_bytes for one in self.by_gpu[gpu][stage])

    def peak(self, gpu: Gpu) -> Stage:
        """Return the stage in which the GPU is fullest."""
        return max(self.by_gpu[gpu], key=lambda stage: self.bytes_in(gpu, stage))

    def actors(self, gpu: Gpu) -> list[str]:
        """Return the processes that share the GPU in any stage."""
        stages = self.by_gpu[gpu].values()
        return list(dict.fromkeys(one.actor for held in stages for one in held))

    def fullest(self) -> Gpu | None:
        """Return the GPU whose peak is highest; None without GPUs."""
        return max(self.by_gpu, key=lambda gpu: self.bytes_in(gpu, self.peak(gpu)), default=None)


def memory_timetable(cfg: Config, models: RunModels, size: int | None) -> MemoryTimetable:
    """Plan the memory of all GPUs, each of ``size`` bytes, for a run with ``models``.

    An engine's KV cache takes a share of the GPU; without ``size`` only the engine's weights count. Of a
    reward model only the weights count, and none while its checkpoint is not on this machine.
    """
    if cfg.policy.device is Device.cpu:
        return MemoryTimetable({})
    places = placement(cfg)
    parts_of = {place.actor: _parts_of(cfg, models, place, size) for place in places}
    gpus = sorted({(place.node, gpu) for place in places for gpu in place.gpus})
    return MemoryTimetable(
        {
            gpu: {
                stage: tuple(
                    GpuMemoryUse(place.actor, place.role, what, num_bytes)
                    for place in places
                    if place.node == gpu[0] and gpu[1] in place.gpus
                    for what, num_bytes in parts_of[place.actor](stage).items()
                    if num_bytes
                )
                for stage in gpu_stages(cfg)
            }
            for gpu in gpus
        }
    )


def gpu_bytes(cfg: Config) -> int | None:
    """Return the configured size of each GPU in bytes; None when the configuration does not say."""
    return None if cfg.cluster.gpu_memory_gib is None else int(cfg.cluster.gpu_memory_gib * GIB)


def format_timetable(timetable: MemoryTimetable) -> list[str]:
    """Return lines for a terminal: processes and peak of every GPU, then all stages of some GPUs.

    These are the fullest GPU of each kind; GPUs of one kind are shared by the same kinds of processes.
    """
    if not timetable.by_gpu:
        return []
    lines = ["", "GPUs"]
    fullest: dict[tuple[str, ...], Gpu] = {}
    for gpu in timetable.by_gpu:
        actors, peak = timetable.actors(gpu), timetable.peak(gpu)
        size = f"at most {timetable.bytes_in(gpu, peak) / GIB:.1f} GiB, in {peak.name}"
        lines.append(f"  node {gpu[0]} GPU {gpu[1]:<4}{', '.join(actors):<34}  {size}")
        kind = tuple(actor.partition("-")[0] for actor in actors)
        best = fullest.setdefault(kind, gpu)
        if timetable.bytes_in(gpu, peak) > timetable.bytes_in(best, timetable.peak(best)):
            fullest[kind] = gpu
    for gpu in fullest.values():
        lines += _table(timetable, gpu)
    return lines


def _table(timetable: MemoryTimetable, gpu: Gpu) -> list[str]:
    """Return a table of one GPU: a row for each part of a process, a column for each stage."""
    stages = timetable.by_gpu[gpu]
    title = f"GiB on node {gpu[0]} GPU {gpu[1]}"
    lines = ["", f"{title:<42}" + "".join(f"{stage.title:>9}" for stage in stages)]
    for key in dict.fromkeys((one.actor, one.what) for held in stages.values() for one in held):
        sizes = [
            sum(one.num_bytes for one in held if (one.actor, one.what) == key) for held in stages.values()
        ]
        row = "".join(f"{size / GIB:>9.1f}" if size else f"{'-':>9}" for size in sizes)
        lines.append(f"  {' '.join(key):<40}{row}")
    totals = "".join(f"{timetable.bytes_in(gpu, stage) / GIB:>9.1f}" for stage in stages)
    return [*lines, f"  {'in all':<40}{totals}"]


def memory_problems(cfg: Config, models: RunModels, size: int) -> Iterator[Problem]:
    """Yield a problem when a GPU needs more than ``size`` bytes, and when an engine has no KV cache."""
    timetable = memory_timetable(cfg, models, size)
    gpu = timetable.fullest()
    if gpu is None:
        return
    key = f"cluster.gpu_memory_gib={size / GIB:.4g}"
    stage = timetable.peak(gpu)
    needed = timetable.bytes_in(gpu, stage)
    if needed > size:
        held = sorted(timetable.by_gpu[gpu][stage], key=lambda one: -one.num_bytes)
        parts = ", ".join(f"{one.actor} {one.what} {one.num_bytes / GIB:.1f}" for one in held)
        yield Problem(
            key=key,
            rule=(
                f"is too little: GPU {gpu[1]} of node {gpu[0]} needs {needed / GIB:.1f} of "
                f"{size / GIB:.1f} GiB in stage {stage.name}: {parts}"
            ),
            remedy="try " + " or ".join(dict.fromkeys(_remedies(cfg, stage, held))),
        )
    for engine, smallest, remedy in _engines(cfg, models):
        share = cfg.generation.vllm_cfg.gpu_memory_utilization
        if share * size < smallest:
            yield Problem(
                key=f"generation.vllm_cfg.gpu_memory_utilization={share:g}",
                rule=(
                    f"gives {engine} {share * size / GIB:.1f} GiB of each GPU, but its weights and the KV "
                    f"cache of one sample need {smallest / GIB:.1f} GiB"
                ),
                remedy=remedy,
            )


def _engines(cfg: Config, models: RunModels) -> Iterator[tuple[str, int, str]]:
    """Yield each kind of engine, the bytes that it needs for one sample, and a remedy that gives it more."""
    if any(place.role is Role.engine for place in placement(cfg)):
        model = models[Role.policy_worker]
        weights = engine_weights(cfg, model) + engine_draft(cfg)
        smallest = weights + _one_sample(cfg, model) + _batched_tokens(cfg, model)
        yield "an engine", smallest, "raise it, or raise generation.vllm_cfg.tensor_parallel_size"
    if cfg.teacher is not None and is_one_engine(cfg.teacher):
        model, num_bytes = models[Role.teacher_worker], value_bytes(cfg.teacher.precision)
        of_sample = cfg.policy.max_total_sequence_length * kv_bytes_per_token(model, num_bytes)
        smallest = model.num_parameters * num_bytes + of_sample
        yield "the teacher's engine", smallest, "raise it, or set teacher.scored_by=workers"


def _parts_of(
    cfg: Config, models: RunModels, place: Place, size: int | None
) -> Callable[[Stage], dict[str, int]]:
    """Return a function from a stage to the parts that the process at ``place`` holds in it, in bytes."""
    policy = models[Role.policy_worker]
    if place.role in (Role.engine, Role.engine_part):
        return lambda stage: _of_engine(cfg, policy, stage, size)
    if place.role is Role.reward_model:
        of_reward_model = _of_reward_model(reward_models(cfg)[place.actor])
        return lambda stage: of_reward_model
    group, model = worker_groups(cfg)[place.role], models[place.role]
    if is_one_engine(group):
        of_engine = _of_teaching_engine(cfg, group, model, size)
        return lambda stage: of_engine
    memory = policy_memory(group, model, place.rank)

    def of_worker(stage: Stage) -> dict[str, int]:
        further = _for_engines(cfg, policy, stage) if place.role is Role.policy_worker else {}
        return _of_worker(group, memory, stage, _STAGES[place.role], further)

    return of_worker


def _of_reward_model(env: EnvConfig) -> dict[str, int]:
    """Return the parts that an environment's reward model holds in every stage, in bytes."""
    options = reward_model(env)
    assert options is not None, "the place is that of a reward model"
    num_scalars = count_stored_scalars(Path(options.model_name))
    return {"weights": num_scalars * value_bytes(options.precision), "context": CONTEXT_BYTES}


def _of_teaching_engine(
    cfg: Config, teacher: WorkerGroupConfig, model: ModelInfo, size: int | None
) -> dict[str, int]:
    """Return the parts that an engine which scores for a teacher holds in every stage, in bytes."""
    weights = model.num_parameters * value_bytes(teacher.precision)
    if size is None:
        return {"weights": weights, "context": CONTEXT_BYTES}
    share = int(cfg.generation.vllm_cfg.gpu_memory_utilization * size)
    return {"weights": weights, "KV cache and work space": max(0, share - weights)}


def _of_engine(cfg: Config, model: ModelInfo, stage: Stage, size: int | None) -> dict[str, int]:
    holds = stage.engine_holds if shares_gpus(cfg) else EngineHolds.everything
    weights, draft = engine_weights(cfg, model), engine_draft(cfg)
    # Beside the buckets, vLLM's loader keeps the tensors of a layer until the layer is complete.
    received = _bucket_bytes(cfg) + max(
        model.parameters.layer * value_bytes(cfg.policy.precision), _largest_tensor(cfg, model)
    )
    buckets = received if stage is Stage.weight_sync else 0
    asleep = {"context": CONTEXT_BYTES, "token counts": _token_counts(cfg, model)}
    if holds is EngineHolds.nothing:
        return asleep
    if holds is EngineHolds.weights:
        graphs = 0 if cfg.generation.vllm_cfg.enforce_eager else GRAPH_BYTES
        return {"weights": weights, "draft": draft, **asleep, "graphs": graphs, "buckets": buckets}
    if size is None:
        return {"weights": weights, "draft": draft, "context": CONTEXT_BYTES, "buckets": buckets}
    rest = int(cfg.generation.vllm_cfg.gpu_memory_utilization * size) - weights - draft
    return {"weights": weights, "draft": draft, "KV cache and work space": max(0, rest), "buckets": buckets}


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupStages:
    """The stages in which a group of training workers computes."""

    scoring: Stage
    training: Stage | None  # None: it never trains
    further: tuple[Stage, ...] = (Stage.policy_start,)

    @property
    def all(self) -> tuple[Stage | None, ...]:
        return (self.scoring, self.training, *self.further)


_STAGES = {
    Role.policy_worker: _GroupStages(
        scoring=Stage.logprobs,
        training=Stage.policy_training,
        further=(Stage.policy_start, Stage.weight_sync),
    ),
    Role.value_worker: _GroupStages(scoring=Stage.values, training=Stage.value_training),
    Role.teacher_worker: _GroupStages(scoring=Stage.teacher_logprobs, training=None),
}


def _of_worker(
    group: WorkerGroupConfig,
    memory: PolicyMemory,
    stage: Stage,
    own: _GroupStages,
    further: Mapping[str, int],
) -> dict[str, int]:
    """Return the parts that a training worker holds in a stage, in bytes, with the ``further`` ones.

    With ``offload_*`` keys, parts leave the GPU in the stages that do not use them.
    """
    if stage is Stage.engine_start:
        return {}
    has_weights = stage in own.all or not group.offload_parameters_between_phases
    has_optimizer = stage is own.training or not parks_optimizer(group)
    # An optimizer that is to leave the GPU is also made on it.
    is_made = stage is Stage.policy_start and not has_optimizer
    activations: dict[Stage | None, int] = {
        own.scoring: memory.logprob_activations,
        own.training: memory.training_activations,
    }
    return {
        "weights": memory.weights * has_weights,
        "start": memory.starting * is_made,
        "gradients": memory.gradients * has_optimizer,
        "optimizer": memory.optimizer * has_optimizer,
        **further,
        "activations": activations.get(stage, 0),
        "context": WORKER_CONTEXT_BYTES,
    }


def _for_engines(cfg: Config, model: ModelInfo, stage: Stage) -> dict[str, int]:
    """Return the parts that a policy worker holds to send weights to engines, in bytes."""
    is_sync = stage is Stage.weight_sync
    return {
        "buckets": _bucket_bytes(cfg),  # kept between transfers
        "tensor to send": _largest_tensor(cfg, model) * is_sync,  # shards are joined one tensor at a time
    }


def _token_counts(cfg: Config, model: ModelInfo) -> int:
    """Return the bytes of an engine's token counts, which it keeps even while it sleeps.

    For each sample vLLM counts the occurrences of each token in four bytes, and notes in one bit whether the
    prompt has the token (``vllm/v1/worker/gpu/sample/penalties.py``).
    """
    words = model.vocab_size + -(-model.vocab_size // 32)
    return 4 * cfg.generation.vllm_cfg.max_num_seqs * words


def engine_weights(cfg: Config, model: ModelInfo) -> int:
    """Return the bytes of weights on each GPU of an engine. Quantised layers, not embeddings, have 8 bits."""
    size = value_bytes(cfg.policy.precision)
    num_bytes = model.num_parameters * size
    if cfg.generation.vllm_cfg.quantization is not None:
        num_bytes -= (model.num_parameters - model.parameters.embeddings) * (size - 1)
    return num_bytes // cfg.generation.vllm_cfg.num_workers


def engine_draft(cfg: Config) -> int:
    """Return the bytes of a draft model on each GPU of an engine; 0 while its checkpoint is not here."""
    return draft_bytes(cfg.generation) // cfg.generation.vllm_cfg.tensor_parallel_size


def _one_sample(cfg: Config, model: ModelInfo) -> int:
    """Return the bytes of the longest sample's KV cache on each GPU of an engine, at least of one KV head."""
    vllm = cfg.generation.vllm_cfg
    parts = min(vllm.tensor_parallel_size, model.num_cached_heads) * vllm.pipeline_parallel_size
    cache = str(cfg.generation.vllm_kwargs.get("kv_cache_dtype", "auto"))
    num_bytes = 1 if cache.startswith("fp8") else value_bytes(cfg.policy.precision)
    return cfg.policy.max_total_sequence_length * kv_bytes_per_token(model, num_bytes) // parts


def _batched_tokens(cfg: Config, model: ModelInfo) -> int:
    """Return the bytes of a layer's activations on each GPU for max_num_batched_tokens; 0 without the key."""
    return layer_bytes(
        model,
        int(cfg.generation.vllm_kwargs.get("max_num_batched_tokens", 0)),
        value_bytes=value_bytes(cfg.policy.precision),
        tp=cfg.generation.vllm_cfg.tensor_parallel_size,
    )


def _bucket_bytes(cfg: Config) -> int:
    """Return the bytes of the two buckets that exist at once during a transfer."""
    return 2 * cfg.generation.weight_bucket_mib * 2**20


def _largest_tensor(cfg: Config, model: ModelInfo) -> int:
    return model.parameters.input_embeddings * value_bytes(cfg.policy.precision)


def _remedies(cfg: Config, stage: Stage, held: Sequence[GpuMemoryUse]) -> Iterator[str]:
    """Yield what may help, beginning with the process that holds most."""
    groups = {Role.policy_worker: cfg.policy, **worker_groups(cfg)}
    for one in held:
        if one.role is Role.reward_model:
            yield "a smaller reward model, or one in bfloat16 (options.precision)"
            continue
        # Engines hold the policy's model.
        role = Role.policy_worker if one.role in (Role.engine, Role.engine_part) else one.role
        what, name, group, own = one.what, role.group, groups[role], _STAGES[role]
        is_idle = stage is Stage.generation and shares_gpus(cfg)
        if cfg.value is not None and cfg.cluster.placement is Placement.colocated:
            is_idle = is_idle or stage not in own.all
        if what == "activations":
            if stage is own.training and not recomputes_layers(group):
                yield f"{name}.{backend_kind_of(group).part}.activation_checkpointing=true"
            yield "micro-batches of fewer tokens"
        elif what in ("gradients", "optimizer") and stage is not own.training:
            yield f"{name}.offload_optimizer_for_logprob=true"
        elif what == "optimizer" and (sharding := _unused_sharding(group)):
            yield f"{name}.{sharding}=true"
        elif what == "weights" and is_idle:
            yield f"{name}.offload_parameters_between_phases=true"
        elif what in ("gradients", "weights", "start"):
            yield "a larger tensor- or pipeline-parallel size"
        elif what.startswith("KV"):
            yield "a lower generation.vllm_cfg.gpu_memory_utilization"


def _unused_sharding(group: WorkerGroupConfig) -> str:
    """Return the key that would spread the optimizer's state over ranks; empty when it is spread already, or
    cannot be."""
    return "" if shards_optimizer(group) or uses_muon(group) else backend_kind_of(group).optimizer_sharding


def gpu_stages(cfg: Config) -> tuple[Stage, ...]:
    """Return the stages of a run, in order; without a critic or a teacher, its stages are left out."""
    groups = {Role.value_worker: cfg.value, Role.teacher_worker: cfg.teacher}
    absent = [_STAGES[role] for role, group in groups.items() if group is None]
    missing = {stage for own in absent for stage in (own.scoring, own.training)}
    return tuple(stage for stage in GPU_STAGES if stage not in missing)
