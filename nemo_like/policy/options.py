"""The keys of worker groups: ``policy``, the critic's ``value`` and the teacher's ``teacher``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, ClassVar

from nemo_like.config.keys import Key
from nemo_like.config.kinds import Kinds

BACKEND_KINDS = Kinds(
    "nemo_like.policy.backend_kinds",
    "training backend",
    "nemo_like.policy.backends.backend_kind:BackendKind",
    has_keys=False,
)


class Device(Enum):
    """Where policy workers compute; it also selects the collective library."""

    cpu = "cpu"  # gloo
    cuda = "cuda"  # NCCL


class Precision(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Fp8Format(Enum):
    """In which 8 bits the products of linear layers are computed."""

    e4m3 = "e4m3"
    hybrid = "hybrid"  # gradients in e5m2


class Fp8Recipe(Enum):
    """How values of 8 bits are scaled."""

    tensorwise = "tensorwise"  # by a tensor's present maximum
    delayed = "delayed"  # by its maximum before
    blockwise = "blockwise"  # by that of each block
    mxfp8 = "mxfp8"  # likewise, in blocks of 32, on Blackwell


class ReferencePlacement(Enum):
    """How weights that wait in host memory get into the model while it scores: weights of the reference
    policy, or of a teacher's further models."""

    host_copy = "host_copy"  # copied in; meanwhile the policy's own are on the host too: two models there
    swap_in_place = "swap_in_place"  # swapped with the policy's, tensor by tensor: one model on the host


class ReplicaFetch(Enum):
    """Which workers fetch a replica's samples from the data plane."""

    leader = "leader"  # its leader alone, which then broadcasts them inside the replica
    every_rank = "every_rank"  # each of the replica's workers


class MicroBatchOrder(Enum):
    """Which samples share a micro-batch of fixed size."""

    by_length = "by_length"  # samples of similar length, longest first: little padding
    as_sampled = "as_sampled"  # neighbours in the batch, as in other frameworks


class LRDecayStyle(Enum):
    constant = "constant"
    linear = "linear"
    cosine = "cosine"


@dataclass(kw_only=True, slots=True)
class MegatronModelConfig:
    """A model of Megatron-core, and how it is spread over ranks. The default of each key asks for nothing."""

    tensor_model_parallel_size: Annotated[
        int, Key("divides attention heads, KV heads, FFN size and vocabulary", 1, at_least=1)
    ]
    pipeline_model_parallel_size: Annotated[
        int, Key("stages, each of which holds some of the layers", 1, at_least=1)
    ]
    num_layers_in_first_pipeline_stage: Annotated[
        int | None,
        Key("layers beside the embeddings; null: as many as the other stages have", None, at_least=1),
    ]
    num_layers_in_last_pipeline_stage: Annotated[
        int | None,
        Key("layers beside the output layer; null: as many as the other stages have", None, at_least=1),
    ]
    virtual_pipeline_model_parallel_size: Annotated[
        int | None,
        Key(
            "chunks of layers of each stage, between which the others have theirs; null: 1", None, at_least=1
        ),
    ]
    context_parallel_size: Annotated[
        int, Key("ranks over which every sequence is divided; for long sequences", 1, at_least=1)
    ]
    expert_model_parallel_size: Annotated[
        int, Key("divides the experts of a mixture and TP x CP x DP", 1, at_least=1)
    ]
    expert_tensor_parallel_size: Annotated[
        int, Key("ranks that share each expert: 1, or as many as tensor_model_parallel_size", 1, at_least=1)
    ]
    sequence_parallel: Annotated[bool, Key("needs tensor_model_parallel_size > 1", False)]
    moe_grouped_gemm: Annotated[
        bool | None,
        Key(
            "A mixture's experts in one grouped matrix product, not one after the other. "
            "null: on GPUs, in bfloat16 or with Transformer Engine.",
            None,
        ),
    ]
    model_kwargs: Annotated[
        dict[str, Any],
        Key("further arguments of Megatron-core's TransformerConfig, passed on as they are", {}),
    ]


@dataclass(kw_only=True, slots=True)
class MegatronConfig(MegatronModelConfig):
    """A model of Megatron-core, how it is spread over ranks, and how it trains. Each default asks for
    nothing."""

    use_distributed_optimizer: Annotated[
        bool, Key("shard the optimizer's state over the data- and context-parallel ranks", False)
    ]
    activation_checkpointing: Annotated[
        bool,
        Key(
            "recompute each layer in the backward instead of keeping what it computed: less "
            "memory, a third more compute",
            False,
        ),
    ]
    router_replay: Annotated[
        bool, Key("true: train a mixture with the experts that the engines chose, token by token", False)
    ]
    freeze_moe_router: Annotated[bool, Key("a mixture's routers keep their weights", False)]
    optimizer_cpu_offload: Annotated[
        bool,
        Key("the optimizer's state stays on the host, and the CPU updates the weights; GPUs only", False),
    ]
    fp8: Annotated[
        Fp8Format | None,
        Key(
            "e4m3 or hybrid: linear layers compute in 8 bits, scoring too, which needs Transformer Engine; "
            "weights stay in bfloat16",
            None,
        ),
    ]
    fp8_recipe: Annotated[
        Fp8Recipe, Key("of fp8: or tensorwise, delayed, mxfp8 (Blackwell)", Fp8Recipe.blockwise)
    ]
    optimizer_kwargs: Annotated[
        dict[str, Any], Key("further arguments of Megatron-core's OptimizerConfig, passed on as they are", {})
    ]


@dataclass(kw_only=True, slots=True)
class ScoringPackingConfig:
    """Micro-batches in which samples lie end to end, without padding between them."""

    enabled: Annotated[bool, Key("not together with dynamic_batching", False)]
    logprob_mb_tokens: Annotated[
        int,
        Key(
            "most tokens in a micro-batch of a log-prob phase; at least max_total_sequence_length",
            8192,
            at_least=1,
        ),
    ]
    share_prompts: Annotated[
        bool, Key("a micro-batch has a prompt once for all its samples: same outputs, fewer tokens", False)
    ]


@dataclass(kw_only=True, slots=True)
class SequencePackingConfig(ScoringPackingConfig):
    """Micro-batches in which samples lie end to end, in scoring and in training."""

    train_mb_tokens: Annotated[int, Key("the same in training", 4096, at_least=1)]


@dataclass(kw_only=True, slots=True)
class ScoringBatchesConfig:
    """Micro-batches of padded samples of similar length, as many samples as a token budget holds."""

    enabled: Annotated[bool, Key("not together with sequence_packing", False)]
    logprob_mb_tokens: Annotated[
        int,
        Key(
            "limit for samples x padded length in a log-prob phase; at least max_total_sequence_length",
            8192,
            at_least=1,
        ),
    ]
    sequence_length_round: Annotated[int, Key("padded lengths are multiples of this", 64, at_least=1)]


@dataclass(kw_only=True, slots=True)
class DynamicBatchingConfig(ScoringBatchesConfig):
    """Micro-batches of padded samples of similar length, in scoring and in training."""

    train_mb_tokens: Annotated[int, Key("the same in training", 4096, at_least=1)]


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Train low-rank adapters beside frozen weights (arXiv 2106.09685).

    generation.lora_sync says what engines get."""

    enabled: Annotated[bool, Key("train adapters, and no other weight", False)]
    rank: Annotated[int, Key("of each adapter", 16, at_least=1)]
    alpha: Annotated[
        float,
        Key(
            "an adapter's output is multiplied by alpha / rank",
            32.0,
            above=0,
            remedy="twice the rank is usual",
        ),
    ]
    dropout: Annotated[
        float, Key("share of an adapter's input that is zeroed, in training only", 0.0, at_least=0, below=1)
    ]
    target_modules: Annotated[
        list[str],
        Key(
            "Or some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj. In a mixture the last "
            "three are of its experts, which get no adapter with all-linear.",
            ["all-linear"],
        ),
    ]
    exclude_modules: Annotated[list[str], Key("layers of target_modules that get no adapter", [])]
    use_rslora: Annotated[
        bool, Key("multiply by alpha / sqrt(rank) in place of alpha / rank (arXiv 2312.03732)", False)
    ]
    adapter_path: Annotated[
        str | None,
        Key(
            "a directory of peft with adapters of the same layers, rank and scale to begin from",
            None,
            is_path=True,
        ),
    ]


@dataclass(kw_only=True, slots=True)
class FsdpModelConfig:
    """A model of transformers, and how it is spread over ranks. The default of each key asks for nothing."""

    tensor_parallel_size: Annotated[int, Key("divides attention heads, KV heads and FFN size", 1, at_least=1)]
    context_parallel_size: Annotated[
        int,
        Key(
            "Ranks over which every sequence is divided; for long sequences. It divides the attention heads "
            "of a rank.",
            1,
            at_least=1,
        ),
    ]
    cpu_offload: Annotated[
        bool, Key("keep sharded weights, gradients and optimizer state in host memory", False)
    ]
    model_kwargs: Annotated[
        dict[str, Any],
        Key("further arguments with which transformers builds the model, such as attn_implementation", {}),
    ]


@dataclass(kw_only=True, slots=True)
class FsdpConfig(FsdpModelConfig):
    """A model of transformers, how it is spread over ranks, and how it trains."""

    activation_checkpointing: Annotated[
        bool, Key("recompute each layer in the backward instead of keeping what it computed", False)
    ]
    reduce_gradients_once: Annotated[
        bool,
        Key(
            "true: gradients are summed over the ranks once per update and not in each "
            "micro-batch, which is faster and has whole gradients in float32 on each device "
            "until then.",
            False,
        ),
    ]


class OptimizerKind(Enum):
    """How gradients become updates."""

    adamw = "adamw"
    muon = "muon"  # of the matrices of layers; AdamW of everything else


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    kind: Annotated[
        OptimizerKind,
        Key(
            "or muon: matrices of layers move by their orthogonalised momentum, all else by AdamW",
            OptimizerKind.adamw,
        ),
    ]
    lr: Annotated[float, Key("the peak of the learning rate", 1e-06, above=0)]
    weight_decay: Annotated[float, Key("decoupled from the gradient", 0.01, at_least=0)]
    adam_beta1: Annotated[float, Key("decay of the mean of the gradients", 0.9, at_least=0, below=1)]
    adam_beta2: Annotated[float, Key("decay of the mean of their squares", 0.999, at_least=0, below=1)]
    adam_eps: Annotated[float, Key("added to the square root of that mean", 1e-08, above=0)]
    muon_momentum: Annotated[float, Key("decay of Muon's mean of the gradients", 0.95, at_least=0, below=1)]
    muon_nesterov: Annotated[
        bool, Key("true: Muon orthogonalises that mean with the gradient mixed in once more", True)
    ]
    muon_ns_steps: Annotated[
        int, Key("iterations of Newton and Schulz that orthogonalise it", 5, at_least=1, at_most=99)
    ]
    muon_scale: Annotated[
        float,
        Key(
            "a change is this x sqrt(rows or columns, the more of them); with 0.2 it has AdamW's size",
            0.2,
            above=0,
        ),
    ]


@dataclass(kw_only=True, slots=True)
class LossScalingConfig:
    """The scale of the loss of precision float16, which keeps gradients in the range of their dtype.

    An update whose gradients overflow is skipped. The names are those of Megatron-core."""

    initial_loss_scale: Annotated[float, Key("the factor of the first update's loss", 65536.0, above=0)]
    loss_scale_window: Annotated[
        int, Key("updates without an overflow, one after the other, that double the scale", 1000, at_least=1)
    ]
    min_loss_scale: Annotated[float, Key("the scale is halved down to this", 1.0, above=0)]
    hysteresis: Annotated[
        int, Key("skipped updates before the scale is halved, since it was last doubled", 1, at_least=1)
    ]
    max_skipped_updates: Annotated[
        int,
        Key("more skipped updates than these, one after the other, are an alarm", 20, at_least=1),
    ]


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    """The learning rate over time, which is counted in optimizer updates, not in steps."""

    warmup_updates: Annotated[int, Key("during these the rate grows linearly from 0 to lr", 0, at_least=0)]
    decay_style: Annotated[LRDecayStyle, Key("constant, linear or cosine", LRDecayStyle.constant)]
    decay_updates: Annotated[
        int,
        Key(
            "the update at which min_lr is reached, warm-up included; by default the run's last; unused by "
            "constant",
            "${updates_of_run:policy}",
            at_least=1,
        ),
    ]
    min_lr: Annotated[float, Key("the learning rate at the end of the decay", 0.0, at_least=0)]


@dataclass(kw_only=True, slots=True)
class WorkerGroupConfig:
    """A model, and how it is spread over TP x CP x PP x DP workers, which score samples in micro-batches."""

    label: ClassVar[str]  # the group of these keys

    model_name: Annotated[
        str,
        Key(
            "a checkpoint's directory, or its name on the Hugging Face hub; megatron: of a family in "
            "docs/reference/models.md",
            is_path=True,
        ),
    ]
    model_overrides: Annotated[
        dict[str, Any],
        Key("entries of the model's config.json to replace, for example {rope_theta: 1000000.0}", {}),
    ]
    backend: Annotated[
        str,
        Key(
            "or fsdp: PyTorch's FSDP2, for any causal language model of transformers",
            "megatron",
            kinds=BACKEND_KINDS,
        ),
    ]
    device: Annotated[Device, Key("cpu (gloo) or cuda (NCCL)", Device.cpu)]
    precision: Annotated[Precision, Key("or bfloat16, or float16", Precision.float32)]
    data_parallel_size: Annotated[int, Key("workers = TP x CP x PP x DP", 1, at_least=1)]
    logprob_batch_size: Annotated[
        int, Key("samples per forward of one worker when only log-probs are wanted", 8, at_least=1)
    ]
    micro_batch_order: Annotated[
        MicroBatchOrder,
        Key(
            "samples of similar length share a micro-batch; or as_sampled: neighbours do",
            MicroBatchOrder.by_length,
        ),
    ]
    sequence_packing: Annotated[
        ScoringPackingConfig,
        Key("micro-batches of samples end to end, without padding; for lengths that differ much"),
    ]
    dynamic_batching: Annotated[
        ScoringBatchesConfig,
        Key("micro-batches of samples of similar length, as many as the budget holds; not with packing"),
    ]
    max_total_sequence_length: Annotated[int, Key("tokens of prompt and response together", 1024, at_least=1)]
    offload_parameters_between_phases: Annotated[
        bool,
        Key("for a GPU that is shared with engines: weights are on it only while a phase needs them", False),
    ]
    reference_placement: Annotated[
        ReferencePlacement,
        Key(
            "or host_copy: never written, at the price of a second model on the host",
            ReferencePlacement.swap_in_place,
        ),
    ]
    replica_fetch: Annotated[
        ReplicaFetch,
        Key(
            "which workers fetch a replica's samples from the data plane: its leader, or every_rank",
            ReplicaFetch.leader,
        ),
    ]
    megatron_cfg: Annotated[MegatronModelConfig, Key("of backend megatron")]
    fsdp_cfg: Annotated[FsdpModelConfig, Key("of backend fsdp")]


@dataclass(kw_only=True, slots=True)
class TrainedGroupConfig(WorkerGroupConfig):
    """A worker group whose workers also train the model."""

    sequence_packing: Annotated[
        SequencePackingConfig,
        Key("micro-batches of samples end to end, without padding; for lengths that differ much"),
    ]
    dynamic_batching: Annotated[
        DynamicBatchingConfig,
        Key("micro-batches of samples of similar length, as many as the budget holds; not with packing"),
    ]
    megatron_cfg: Annotated[MegatronConfig, Key("of backend megatron")]
    fsdp_cfg: Annotated[FsdpConfig, Key("of backend fsdp")]
    train_global_batch_size: Annotated[
        int, Key("samples per optimizer update; divides N, multiple of DP x micro-batch", 512, at_least=1)
    ]
    train_micro_batch_size: Annotated[
        int, Key("samples per forward and backward of one worker", 4, at_least=1)
    ]
    max_grad_norm: Annotated[float, Key("gradients are scaled down to this norm", 1.0, above=0)]
    loss_scaling: Annotated[LossScalingConfig, Key("of precision float16")]
    offload_optimizer_for_logprob: Annotated[
        bool,
        Key(
            "Likewise: optimizer state and gradients are on it only during training.",
            False,
        ),
    ]
    lora: Annotated[
        LoraConfig,
        Key(
            "of both backends: train low-rank adapters only; exports get merged weights, "
            "engines too (see generation.lora_sync)"
        ),
    ]
    freeze_vision_tower: Annotated[
        bool, Key("of a model that reads images: true trains its language model alone", False)
    ]
    optimizer: Annotated[OptimizerConfig, Key("AdamW, or Muon for the matrices of layers")]
    scheduler: Annotated[SchedulerConfig, Key("counted in optimizer updates, not in steps")]


@dataclass(kw_only=True, slots=True)
class PolicyConfig(TrainedGroupConfig):
    """The model that is trained, and how it is spread over TP x CP x PP x DP workers."""

    label: ClassVar[str] = "policy"

    tokenizer: Annotated[
        str | None,
        Key("a directory, or a name on the hub, with another tokenizer than the model's", None, is_path=True),
    ]
    trust_remote_code: Annotated[
        bool,
        Key(
            "Python code that a checkpoint of policy, critic or teacher brings (auto_map) runs: read it "
            "first",
            False,
        ),
    ]
    external_lib: Annotated[
        list[str], Key("modules that processes import before they build a model or a tokenizer", [])
    ]


@dataclass(kw_only=True, slots=True)
class ValueConfig(TrainedGroupConfig):
    """The critic of grpo.adv_estimator.name=gae: a second worker group, which may have another model, backend
    and layout than the policy. Keys that are not set have the values of the group policy."""

    label: ClassVar[str] = "value"

    otherwise: ClassVar[Mapping[str, Key]] = {
        "model_name": Key(
            "or a reward model, whose output layer the critic then starts from; else it starts from 0",
            "${policy.model_name}",
            is_path=True,
        ),
        "megatron_cfg.router_replay": Key(
            "engines sample with the policy's routers; the critic has its own", False
        ),
        "scheduler.decay_updates": Key("by default the critic's last", "${updates_of_run:value}"),
        "lora.enabled": Key("train adapters beside the critic's layers, and its output layer", False),
        "lora.adapter_path": Key(
            "a directory of peft, whose adapters the critic begins with", None, is_path=True
        ),
        "optimizer.lr": Key("critics usually learn faster than policies", 1e-5),
    }

    num_epochs_per_rollout: Annotated[
        int,
        Key(
            "how often a step trains the critic on each sample", "${grpo.num_epochs_per_rollout}", at_least=1
        ),
    ]
    warmup_steps: Annotated[int, Key("in the first steps of a run the critic trains alone", 0, at_least=0)]
    clip_range: Annotated[
        float | None,
        Key(
            "an update moves a value at most so far, in units of the reward; null: freely",
            0.2,
            above=0,
            remedy="null does not clip",
        ),
    ]
    gae_gamma: Annotated[float, Key("discount per response token", 1.0, at_least=0, at_most=1)]
    gae_lambda: Annotated[
        float, Key("0 trusts the values alone, 1 the rewards alone", 0.95, at_least=0, at_most=1)
    ]
    gae_lambda_policy: Annotated[
        float | None,
        Key(
            "lambda of the policy's advantages, where gae_lambda is that of the critic's returns alone; "
            "null: one for both",
            None,
            at_least=0,
            at_most=1,
        ),
    ]
    gae_length_adaptive_alpha: Annotated[
        float | None,
        Key(
            "a sample's lambda of the policy's advantages is 1 - 1 / (this x its response tokens), e.g. "
            "0.05; null: one for all",
            None,
            above=0,
            remedy="null gives all samples one lambda",
        ),
    ]
    bootstrap_truncated: Annotated[
        bool,
        Key(
            "true: a sample that ran into a limit of tokens ends with its value; see "
            "docs/explanation/critic.md for the risk",
            False,
        ),
    ]


class TeacherScoring(Enum):
    """Who holds a teacher's model and scores samples by it."""

    workers = "workers"
    engine = "engine"


@dataclass(kw_only=True, slots=True)
class TeacherConfig(WorkerGroupConfig):
    """The teacher of loss_fn.kind=distillation: a second worker group, which is frozen, and may have another
    backend and layout than the policy. Keys that are not set have the values of the group policy."""

    label: ClassVar[str] = "teacher"
    otherwise: ClassVar[Mapping[str, Key]] = {
        "model_name": Key("with the policy's tokenizer", is_path=True),
        "model_overrides": Key("entries of the teacher's config.json to replace", {}),
    }

    models: Annotated[
        dict[str, str],
        Key(
            "of tasks with teachers of their own, for example {math: CHECKPOINT}, by their names in env",
            {},
            is_path=True,
        ),
    ]
    scored_by: Annotated[
        TeacherScoring,
        Key("or engine: one vLLM engine, which needs generation.temperature=1", TeacherScoring.workers),
    ]
