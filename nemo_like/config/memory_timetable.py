"""Which process holds how many bytes of which GPU in which stage of a run, and whether they fit.

``--dry-run`` prints it; the rules and the start of a run check it against the size of the GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from nemo_like.config.derived import shares_gpus
from nemo_like.config.gpu_stages import ENGINE_HOLDS, EngineHolds, GpuStage
from nemo_like.config.model_arithmetic import kv_bytes_per_token
from nemo_like.config.model_info import ModelInfo
from nemo_like.config.places import Place, placement
from nemo_like.config.policy_memory import PolicyMemory, policy_memory
from nemo_like.config.problems import Problem
from nemo_like.config.roles import Role
from nemo_like.config.schema import Config, Device, Precision

GIB = 2**30
# Of each process: CUDA's context and kernels, NCCL's buffers, what PyTorch's allocator cannot use. It is an
# assumption.
CONTEXT_BYTES = GIB

Gpu = tuple[int, int]  # node, index of the GPU on it


@dataclass(frozen=True, slots=True)
class Holding:
    """What one process holds on a GPU."""

    actor: str
    what: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryTimetable:
    """The holdings on every GPU of a run, by stage; empty on the CPU."""

    holdings: Mapping[Gpu, Mapping[GpuStage, tuple[Holding, ...]]]

    def bytes_in(self, gpu: Gpu, stage: GpuStage) -> int:
        return sum(holding.num_bytes for holding in self.holdings[gpu][stage])

    def peak(self, gpu: Gpu) -> GpuStage:
        """Return the stage in which the GPU is fullest."""
        return max(GpuStage, key=lambda stage: self.bytes_in(gpu, stage))

    def actors(self, gpu: Gpu) -> list[str]:
        """Return the processes that share the GPU in any stage."""
        stages = self.holdings[gpu].values()
        return list(dict.fromkeys(holding.actor for held in stages for holding in held))

    def fullest(self) -> Gpu | None:
        """Return the GPU that is fullest in any stage; None without GPUs."""
        return max(self.holdings, key=lambda gpu: self.bytes_in(gpu, self.peak(gpu)), default=None)


def memory_timetable(cfg: Config, model: ModelInfo, size: int | None) -> MemoryTimetable:
    """Plan the memory of a run's GPUs, each of ``size`` bytes.

    Without that size an engine counts with its weights alone, since its KV cache takes a share of the GPU.
    """
    if cfg.policy.device is Device.cpu:
        return MemoryTimetable({})
    places = placement(cfg)
    gpus = sorted({(place.node, gpu) for place in places for gpu in place.gpus})
    return MemoryTimetable(
        {
            gpu: {
                stage: tuple(
                    holding
                    for place in places
                    if place.node == gpu[0] and gpu[1] in place.gpus
                    for holding in _of_process(cfg, model, place, stage, size)
                )
                for stage in GpuStage
            }
            for gpu in gpus
        }
    )


def gpu_bytes(cfg: Config) -> int | None:
    """Return the configured size of each GPU; None where the configuration does not say."""
    return None if cfg.cluster.gpu_memory_gib is None else int(cfg.cluster.gpu_memory_gib * GIB)


def format_timetable(timetable: MemoryTimetable) -> list[str]:
    """Return lines for a terminal: the processes and the peak of every GPU; then all stages of a few.

    Those few are the fullest GPU of each kind, by the kinds of processes that share it.
    """
    if not timetable.holdings:
        return []
    lines = ["", "GPUs"]
    fullest: dict[tuple[str, ...], Gpu] = {}
    for gpu in timetable.holdings:
        actors, peak = timetable.actors(gpu), timetable.peak(gpu)
        size = f"at most {timetable.bytes_in(gpu, peak) / GIB:.1f} GiB, in {peak.value}"
        lines.append(f"  node {gpu[0]} GPU {gpu[1]:<4}{', '.join(actors):<36}{size}")
        kind = tuple(actor.partition("-")[0] for actor in actors)
        best = fullest.setdefault(kind, gpu)
        if timetable.bytes_in(gpu, peak) > timetable.bytes_in(best, timetable.peak(best)):
            fullest[kind] = gpu
    for gpu in fullest.values():
        lines += _table(timetable, gpu)
    return lines


def _table(timetable: MemoryTimetable, gpu: Gpu) -> list[str]:
    """Return a table of one GPU: a row for each holding, a column for each stage."""
    stages = timetable.holdings[gpu]
    title = f"GiB on node {gpu[0]} GPU {gpu[1]}"
    lines = ["", f"{title:<42}" + "".join(f"{_TITLES[stage]:>9}" for stage in GpuStage)]
    for key in dict.fromkeys((one.actor, one.what) for stage in GpuStage for one in stages[stage]):
        sizes = [
            sum(one.num_bytes for one in stages[stage] if (one.actor, one.what) == key) for stage in GpuStage
        ]
        row = "".join(f"{size / GIB:>9.1f}" if size else f"{'-':>9}" for size in sizes)
        lines.append(f"  {' '.join(key):<40}{row}")
    totals = "".join(f"{timetable.bytes_in(gpu, stage) / GIB:>9.1f}" for stage in GpuStage)
    return [*lines, f"  {'in all':<40}{totals}"]


_TITLES = {
    GpuStage.engine_start: "engines",
    GpuStage.policy_start: "policy",
    GpuStage.weight_sync: "sync",
    GpuStage.generation: "generate",
    GpuStage.logprobs: "logprobs",
    GpuStage.policy_training: "train",
}


def memory_problems(cfg: Config, model: ModelInfo, size: int) -> Iterator[Problem]:
    """Yield the problem of the fullest GPU when it is too small, and that of engines without room to cache.

    ``size`` is that of each GPU in bytes.
    """
    timetable = memory_timetable(cfg, model, size)
    gpu = timetable.fullest()
    if gpu is None:
        return
    key = f"cluster.gpu_memory_gib={size / GIB:.4g}"
    stage = timetable.peak(gpu)
    needed = timetable.bytes_in(gpu, stage)
    if needed > size:
        held = sorted(timetable.holdings[gpu][stage], key=lambda holding: -holding.num_bytes)
        parts = ", ".join(f"{one.actor} {one.what} {one.num_bytes / GIB:.1f}" for one in held)
        yield Problem(
            key=key,
            rule=(
                f"is too little: GPU {gpu[1]} of node {gpu[0]} needs {needed / GIB:.1f} of "
                f"{size / GIB:.1f} GiB in stage {stage.value}: {parts}"
            ),
            remedy="try " + " or ".join(dict.fromkeys(_remedies(cfg, stage, held))),
        )
    share = cfg.generation.vllm_cfg.gpu_memory_utilization
    smallest = _engine_weights(cfg, model) + _one_sample(cfg, model)
    has_engines = any(place.actor.startswith(Role.engine.name) for place in placement(cfg))
    if has_engines and share * size < smallest:
        yield Problem(
            key=f"generation.vllm_cfg.gpu_memory_utilization={share:g}",
            rule=(
                f"gives an engine {share * size / GIB:.1f} GiB of each GPU, but its weights and the KV "
                f"cache of one sample need {smallest / GIB:.1f} GiB"
            ),
            remedy="raise it, or raise generation.vllm_cfg.tensor_parallel_size",
        )


def _of_process(
    cfg: Config, model: ModelInfo, place: Place, stage: GpuStage, size: int | None
) -> list[Holding]:
    if place.actor.startswith(Role.engine.name):
        parts = _of_engine(cfg, model, stage, size)
    else:
        rank = int(place.actor.rpartition("-")[2]) if "-" in place.actor else 0
        parts = _of_worker(cfg, model, policy_memory(cfg, model, rank), stage)
    return [Holding(place.actor, what, size) for what, size in parts.items() if size]


def _of_engine(cfg: Config, model: ModelInfo, stage: GpuStage, size: int | None) -> dict[str, int]:
    holds = ENGINE_HOLDS[stage] if shares_gpus(cfg) else EngineHolds.everything
    weights = _engine_weights(cfg, model)
    # Beside the buckets, vLLM's loader keeps the tensors of a layer until the layer is complete.
    received = _bucket_bytes(cfg) + max(
        model.parameters.layer * _value_bytes(cfg), _largest_tensor(cfg, model)
    )
    buckets = received if stage is GpuStage.weight_sync else 0
    if holds is EngineHolds.nothing:
        return {"context": CONTEXT_BYTES}
    if holds is EngineHolds.weights or size is None:
        return {"weights": weights, "context": CONTEXT_BYTES, "buckets": buckets}
    share = int(cfg.generation.vllm_cfg.gpu_memory_utilization * size)
    return {"weights": weights, "KV cache and work space": max(0, share - weights), "buckets": buckets}


def _of_worker(cfg: Config, model: ModelInfo, memory: PolicyMemory, stage: GpuStage) -> dict[str, int]:
    """Return what a policy worker holds; ``policy.offload_*`` has parts leave while nothing uses them."""
    if stage is GpuStage.engine_start:
        return {}
    policy, is_training = cfg.policy, stage is GpuStage.policy_training
    has_weights = stage is not GpuStage.generation or not policy.offload_parameters_between_phases
    has_optimizer = is_training or not policy.offload_optimizer_for_logprob
    activations = {
        GpuStage.logprobs: memory.logprob_activations,
        GpuStage.policy_training: memory.training_activations,
        GpuStage.weight_sync: _largest_tensor(cfg, model),  # its parts are joined one tensor at a time
    }
    return {
        "weights": memory.weights * has_weights,
        "gradients": memory.gradients * has_optimizer,
        "optimizer": memory.optimizer * has_optimizer,
        "buckets": _bucket_bytes(cfg),  # kept between transfers
        "tensor to send" if stage is GpuStage.weight_sync else "activations": activations.get(stage, 0),
        "context": CONTEXT_BYTES,
    }


def _engine_weights(cfg: Config, model: ModelInfo) -> int:
    """Return the weights on each GPU of an engine; 8 bits are those of the layers, not of the embeddings."""
    num_bytes = model.num_parameters * _value_bytes(cfg)
    if cfg.generation.vllm_cfg.quantization is not None:
        num_bytes -= (model.num_parameters - model.parameters.embeddings) * (_value_bytes(cfg) - 1)
    return num_bytes // cfg.generation.vllm_cfg.tensor_parallel_size


def _one_sample(cfg: Config, model: ModelInfo) -> int:
    """Return the KV cache of the longest sample on each GPU of an engine; at least one KV head is on each."""
    parts = min(cfg.generation.vllm_cfg.tensor_parallel_size, model.num_kv_heads)
    return cfg.policy.max_total_sequence_length * kv_bytes_per_token(model, _value_bytes(cfg)) // parts


def _bucket_bytes(cfg: Config) -> int:
    """Return the bytes of the two buckets of a transfer that exist at once."""
    return 2 * cfg.generation.weight_bucket_mib * 2**20


def _largest_tensor(cfg: Config, model: ModelInfo) -> int:
    return model.parameters.input_embeddings * _value_bytes(cfg)


def _value_bytes(cfg: Config) -> int:
    return 4 if cfg.policy.precision is Precision.float32 else 2


def _remedies(cfg: Config, stage: GpuStage, held: Sequence[Holding]) -> Iterator[str]:
    """Yield what may help, for the largest holdings first."""
    policy = cfg.policy
    for what in dict.fromkeys(one.what for one in held):
        if what == "activations":
            yield "activation_checkpointing=true or micro-batches of fewer tokens"
        elif what in ("gradients", "optimizer") and stage is not GpuStage.policy_training:
            yield "policy.offload_optimizer_for_logprob=true"
        elif what == "optimizer" and not policy.megatron_cfg.use_distributed_optimizer:
            yield "policy.megatron_cfg.use_distributed_optimizer=true"
        elif what == "weights" and stage is GpuStage.generation and shares_gpus(cfg):
            yield "policy.offload_parameters_between_phases=true"
        elif what in ("gradients", "weights"):
            yield "a larger tensor- or pipeline-parallel size"
        elif what.startswith("KV"):
            yield "a lower generation.vllm_cfg.gpu_memory_utilization"
