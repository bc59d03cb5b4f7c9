"""Tiny checkpoints, configurations and batches for policy tests, and processes that form a world."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DeepseekV3Config,
    Ernie4_5Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Olmo3Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
)

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    ENTROPIES,
    IMAGE_COLUMNS,
    POLICY_COLUMNS,
    ROLLOUT_COLUMNS,
    VALUE_COLUMNS,
    Column,
)
from nemo_like.batch.meta import GlobalBatch, KVBatchMeta, MicroBatch, Schedule
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.interface import DataPlane
from nemo_like.policy.backends.interface import FurtherColumns, WorkerConnections
from nemo_like.policy.options import (
    Device,
    DynamicBatchingConfig,
    Fp8Recipe,
    FsdpConfig,
    LoraConfig,
    LossScalingConfig,
    LRDecayStyle,
    MegatronConfig,
    MicroBatchOrder,
    OptimizerConfig,
    OptimizerKind,
    PolicyConfig,
    Precision,
    ReferencePlacement,
    ReplicaFetch,
    SchedulerConfig,
    SequencePackingConfig,
    TeacherConfig,
    TeacherScoring,
    TrainedGroupConfig,
    ValueConfig,
    WorkerGroupConfig,
)
from nemo_like.policy.workers.value_worker import ValueWorker
from nemo_like.policy.workers.worker import PolicyWorker
from nemo_like.tripwires.options import Tripwires
from tests.unit.algorithms.loss_cases import of_kind

VOCAB_SIZE = 96
GROUP_SIZE = 4
PAD_ID = 7
# Nothing here is what Megatron-core or transformers take by default, so that what is not read shows.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 3e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    "attention_dropout": 0.2,
    "pad_token_id": PAD_ID,
    "initializer_range": 0.1,  # far from uniform log-probs, so that mistakes show
}
# Of latent attention; transformers norms latents with this epsilon, whatever config.json says.
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "q_lora_rank": 28,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 48,
    "routed_scaling_factor": 2.2,
}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 700.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 0.5,
}
# By the name of a family's file: the class of its configuration, and what that has beyond _SIZES.
TINY_MODELS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "deepseek_v3": (
        DeepseekV3Config,
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 1,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {
                **_YARN,
                "mscale": 0.7,
                "mscale_all_dim": 1.2,
            },
        },
    ),
    "ernie4_5": (Ernie4_5Config, {"head_dim": 24}),
    "gemma3_text": (
        Gemma3TextConfig,
        {
            "head_dim": 24,
            "query_pre_attn_scalar": 10,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 700.0, "factor": 4.0},
            },
        },
    ),
    "glm4_moe": (
        Glm4MoeConfig,
        {
            "head_dim": 24,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 48,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
            "rope_parameters": {**_SIZES["rope_parameters"], "partial_rotary_factor": 0.5},
        },
    ),
    "glm4_moe_lite": (Glm4MoeLiteConfig, {**_LATENT, "q_lora_rank": None}),
    "gpt_oss": (
        GptOssConfig,
        {
            "head_dim": 24,
            "rms_norm_eps": 1e-5,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "rope_parameters": {
                **_YARN,
                "truncate": False,
            },
        },
    ),
    "llama": (LlamaConfig, {}),
    "minimax_m2": (
        MiniMaxM2Config,
        {
            "head_dim": 24,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {**_SIZES["rope_parameters"], "partial_rotary_factor": 0.5},
            # vLLM reads these from config.json.
            "rotary_dim": 12,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "bos_token_id": None,
            "eos_token_id": 1,
        },
    ),
    "mistral": (MistralConfig, {"head_dim": 24, "sliding_window": 5}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "olmo2": (Olmo2Config, {}),
    "olmo3": (
        Olmo3Config,
        {
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
                "full_attention": {
                    **_YARN,
                    "attention_factor": 1.3,
                },
            },
        },
    ),
    "phi3": (Phi3Config, {"rope_parameters": {**_SIZES["rope_parameters"], "partial_rotary_factor": 0.75}}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 24}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {
            "head_dim": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "router_aux_loss_coef": 0.5,
            "output_router_logits": True,
        },
    ),
    "seed_oss": (SeedOssConfig, {"head_dim": 24}),
}

# A router's choice in bfloat16 is not that in float32 where two experts score alike, and then the log-prob of
# a token is another one. With these sizes every token goes to every expert, by the expert's weight for it.
ALL_EXPERTS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"num_experts_per_tok": 8, "n_group": 1},
    "glm4_moe": {"num_experts_per_tok": 4},
    "gpt_oss": {"num_experts_per_tok": 4},
}


def make_checkpoint(
    path: Path,
    model_type: str = "qwen3",
    *,
    tied: bool = True,
    shard_size: str = "1GB",
    is_critic: bool = False,
    seed: int = 11,
    **changes: Any,
) -> Path:
    """A random checkpoint directory of the named architecture, with changes of its configuration; the same
    weights every time with a ``seed``. That of a critic has a head with one output."""
    torch.manual_seed(seed)
    make_config, own = TINY_MODELS[model_type]
    sizes = {**_SIZES, **own, **changes, **({"num_labels": 1} if is_critic else {})}
    kind = AutoModelForSequenceClassification if is_critic else AutoModelForCausalLM
    model = kind.from_config(make_config(tie_word_embeddings=tied, **sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith("gate_up_proj_bias"):  # some beyond the limit of gpt-oss
                parameter.mul_(40)
            if name.endswith("sinks"):
                parameter.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer.add_(0.2 * torch.randn_like(buffer))
        # transformers makes it 0; where the padding token is also that which ends a sequence, it is not.
        model.get_input_embeddings().weight[PAD_ID].normal_(std=_SIZES["initializer_range"])
    model.save_pretrained(path, max_shard_size=shard_size)
    return path


class MicroBatching(Enum):
    """How micro-batches are made."""

    padded = "padded"
    packed = "packed"
    dynamic = "dynamic"
    shared = "shared"


def policy_config(
    model: Path,
    *,
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    cp: int = 1,
    ep: int = 1,
    etp: int = 1,
    sequence_parallel: bool = False,
    activation_checkpointing: bool = False,
    moe_grouped_gemm: bool | None = None,
    router_replay: bool = False,
    use_distributed_optimizer: bool = True,
    micro_batch_size: int = 4,
    micro_batching: MicroBatching = MicroBatching.padded,
    reference_placement: ReferencePlacement = ReferencePlacement.swap_in_place,
    replica_fetch: ReplicaFetch = ReplicaFetch.leader,
    offloads: bool = False,
    device: Device = Device.cpu,
    precision: Precision = Precision.float32,
    initial_loss_scale: float = 1024.0,
    backend: str = "megatron",
    adapts: tuple[str, ...] = (),
    end_stages: tuple[int | None, int | None] = (None, None),
    vpp: int | None = None,
    freezes_routers: bool = False,
    optimizer_kind: OptimizerKind = OptimizerKind.adamw,
) -> PolicyConfig:
    is_fsdp = backend == "fsdp"
    return PolicyConfig(
        model_overrides={},
        tokenizer=None,
        trust_remote_code=False,
        external_lib=[],
        model_name=str(model),
        backend=backend,
        device=device,
        precision=precision,
        data_parallel_size=dp,
        train_global_batch_size=8,
        train_micro_batch_size=micro_batch_size,
        logprob_batch_size=micro_batch_size,
        micro_batch_order=MicroBatchOrder.by_length,
        sequence_packing=SequencePackingConfig(
            enabled=micro_batching in (MicroBatching.packed, MicroBatching.shared),
            train_mb_tokens=48,
            logprob_mb_tokens=64,
            share_prompts=micro_batching is MicroBatching.shared,
        ),
        dynamic_batching=DynamicBatchingConfig(
            enabled=micro_batching is MicroBatching.dynamic,
            train_mb_tokens=48,
            logprob_mb_tokens=64,
            sequence_length_round=4,
        ),
        max_total_sequence_length=64,
        max_grad_norm=0.5,
        loss_scaling=LossScalingConfig(
            initial_loss_scale=initial_loss_scale,
            loss_scale_window=2,
            min_loss_scale=1.0,
            hysteresis=1,
            max_skipped_updates=20,
        ),
        offload_optimizer_for_logprob=offloads,
        offload_parameters_between_phases=offloads,
        reference_placement=reference_placement,
        replica_fetch=replica_fetch,
        megatron_cfg=MegatronConfig(
            tensor_model_parallel_size=1 if is_fsdp else tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vpp,
            num_layers_in_first_pipeline_stage=end_stages[0],
            num_layers_in_last_pipeline_stage=end_stages[1],
            freeze_moe_router=freezes_routers,
            context_parallel_size=1 if is_fsdp else cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp,
            sequence_parallel=sequence_parallel,
            use_distributed_optimizer=use_distributed_optimizer,
            optimizer_cpu_offload=False,
            activation_checkpointing=activation_checkpointing,
            moe_grouped_gemm=moe_grouped_gemm,
            router_replay=router_replay,
            fp8=None,
            fp8_recipe=Fp8Recipe.blockwise,
            model_kwargs={},
            optimizer_kwargs={},
        ),
        fsdp_cfg=FsdpConfig(
            tensor_parallel_size=tp if is_fsdp else 1,
            context_parallel_size=cp if is_fsdp else 1,
            activation_checkpointing=False,
            cpu_offload=False,
            reduce_gradients_once=False,
            model_kwargs={},
        ),
        lora=LoraConfig(
            enabled=bool(adapts),
            rank=4,
            alpha=8.0,
            dropout=0.0,
            target_modules=list(adapts) or ["all-linear"],
            exclude_modules=[],
            use_rslora=False,
            adapter_path=None,
        ),
        freeze_vision_tower=False,
        # Adam divides a gradient that is zero but for rounding by little more than adam_eps: with 1e-6, one
        # processor's rounding moved a weight by more than the tests allow.
        optimizer=OptimizerConfig(
            kind=optimizer_kind,
            lr=2e-3,
            weight_decay=0.01,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_eps=1e-5,
            muon_momentum=0.9,
            muon_nesterov=True,
            muon_ns_steps=5,
            muon_scale=0.2,
        ),
        scheduler=SchedulerConfig(
            warmup_updates=2, decay_style=LRDecayStyle.linear, decay_updates=6, min_lr=1e-4
        ),
    )


def value_config(group: PolicyConfig, **changes: Any) -> ValueConfig:
    """The configuration of a critic with the keys of ``group``, with changes by field name."""
    own: dict[str, Any] = {
        "num_epochs_per_rollout": 1,
        "warmup_steps": 0,
        "clip_range": 0.2,
        "gae_gamma": 1.0,
        "gae_lambda": 0.95,
        "gae_lambda_policy": None,
        "gae_length_adaptive_alpha": None,
        "bootstrap_truncated": True,
    }
    shared = {one.name: getattr(group, one.name) for one in fields(TrainedGroupConfig)}
    return ValueConfig(**{**shared, **own, **changes})


def teacher_config(group: PolicyConfig, models: Mapping[str, str] | None = None) -> TeacherConfig:
    """The configuration of a teacher with the keys of ``group``, and with further models by task."""
    own = {"models": dict(models or {}), "scored_by": TeacherScoring.workers}
    return TeacherConfig(**_fields_of(WorkerGroupConfig, group), **own)


def _fields_of(kind: type, config: Any) -> dict[str, Any]:
    """The fields of ``kind`` from a configuration with more, with groups that are of ``kind`` too."""
    found = {}
    types = get_type_hints(kind)
    for name in (one.name for one in fields(kind)):
        value, its_kind = getattr(config, name), types[name]
        found[name] = its_kind(**_fields_of(its_kind, value)) if is_dataclass(its_kind) else value
    return found


def loss_config(kind: str = "policy_gradient", *, kl_penalty: float = 0.0, **changes: Any) -> LossConfig:
    """The loss of a kind, with clip-higher and dual clip where it has them, with changes by field name."""
    return replace(of_kind(kind, {"ratio_clip_c": 3.0}, reference_policy_kl_penalty=kl_penalty), **changes)


def random_batch(num_samples: int, seed: int = 5) -> dict[str, Any]:
    """Packed columns, lengths and tags of samples with 3 prompt tokens and 4 to 21 generated ones; groups of
    four have one prompt. The padding token is in the first group's prompt, and in two responses."""
    rng = np.random.default_rng(seed)
    lengths = [int(length) for length in rng.integers(7, 25, num_samples)]
    mask = np.concatenate([np.r_[np.zeros(3), np.ones(length - 3)] for length in lengths]).astype(np.uint8)
    total = sum(lengths)
    token_ids = rng.integers(2, VOCAB_SIZE, total).astype(np.int32)
    starts = np.cumsum(lengths) - lengths
    for row, start in enumerate(starts):
        first = starts[row // GROUP_SIZE * GROUP_SIZE]
        token_ids[start : start + 3] = token_ids[first : first + 3]
    token_ids[starts[:GROUP_SIZE] + 1] = PAD_ID
    token_ids[starts[[0, -1]] + 4] = PAD_ID
    return {
        "lengths": lengths,
        "columns": {
            "input_ids": token_ids,
            "response_mask": mask,
            "generation_logprobs": (-rng.random(total) * mask).astype(np.float32),
        },
        "tags": {
            "advantage": [float(value) for value in rng.normal(size=num_samples)],
            "sample_mask": [float(index % 5 != 3) for index in range(num_samples)],
            "num_response_tokens": [length - 3 for length in lengths],
            "num_prompt_tokens": [3] * num_samples,
            "group_id": [row // GROUP_SIZE for row in range(num_samples)],
        },
    }


def make_schedule(
    lengths: list[int],
    sample_mask: list[float],
    rows_of_updates: list[list[list[int]]],
    all_rows: list[list[int]],
    prompt: int = 3,
) -> Schedule:
    """A schedule by hand: ``rows_of_updates[update][micro-batch]`` are positions on this rank;
    ``all_rows[update]`` are the update's samples over all ranks, as positions in ``lengths``."""
    return Schedule(
        tuple(
            GlobalBatch(
                num_samples=sum(sample_mask[row] > 0 for row in everyone),
                num_tokens=sum(lengths[row] - prompt for row in everyone if sample_mask[row] > 0),
                micro_batches=tuple(
                    MicroBatch(tuple(rows), max(lengths[row] for row in rows)) for rows in micro_batches
                ),
            )
            for micro_batches, everyone in zip(rows_of_updates, all_rows, strict=True)
        )
    )


def put_samples(
    plane: DataPlane, partition: str, batch: dict[str, Any], chunk_size: int = GROUP_SIZE
) -> KVBatchMeta:
    """A partition with the batch's columns, of which ``more_columns`` are declared with it, and tags; a batch
    may have ``chunk_sizes`` of its own."""
    images = [column for column in IMAGE_COLUMNS if column.name in batch["columns"]]
    written = [*ROLLOUT_COLUMNS, *images, *batch.get("more_columns", ())]
    plane.open_partition(partition, [*written, *POLICY_COLUMNS, ENTROPIES, *VALUE_COLUMNS])
    lengths = batch["lengths"]
    columns = {column.name: batch["columns"][column.name] for column in written}
    chunk_sizes = batch.get("chunk_sizes") or [chunk_size] * (len(lengths) // chunk_size)
    return plane.put(partition, columns, lengths=lengths, chunk_sizes=chunk_sizes, tags=batch["tags"])


def ready_worker(
    cfg: PolicyConfig,
    loss: LossConfig,
    coordinates: Coordinates,
    plane: DataPlane,
    temperature: float = 1.0,
    further_reads: Sequence[Column] = (),
    further_inputs: Sequence[Column] = (),
) -> PolicyWorker:
    """On a rank of a world, where torch.distributed is initialised already; with tripwires."""
    worker = PolicyWorker(
        cfg=cfg,
        loss=loss,
        connections=WorkerConnections(coordinates, plane, ("127.0.0.1", 0), 60.0, tuple(further_inputs)),
        temperature=temperature,
        weight_sender=None,
        tripwires=Tripwires.all,
        further=FurtherColumns(reads=further_reads),
    )
    worker.setup()
    return worker


def ready_value_worker(
    cfg: ValueConfig,
    loss: LossConfig,
    coordinates: Coordinates,
    plane: DataPlane,
    inputs: Sequence[Column] = (),
) -> ValueWorker:
    """The same of a critic."""
    worker = ValueWorker(
        cfg=cfg,
        loss=loss,
        connections=WorkerConnections(coordinates, plane, ("127.0.0.1", 0), 60.0, tuple(inputs)),
        tripwires=Tripwires.all,
    )
    worker.setup()
    return worker
