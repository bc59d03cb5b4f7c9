"""The typed configuration: every key with its type, its unit and what it does.

The values are in ``configs/``, one commented default file per group. No field here has a default, so each
default is written down in exactly one place. ``config.loader`` merges YAML and overrides into these
classes; ``config.rules`` checks the values, also where a rule spans several keys.

A key has the name that NeMo-RL gives it, where NeMo-RL has such a key, so that runs can be compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Device(Enum):
    """Where policy workers compute; it also selects the collective library."""

    cpu = "cpu"  # gloo
    cuda = "cuda"  # NCCL


class Precision(Enum):
    float32 = "float32"
    bfloat16 = "bfloat16"


class PolicyBackend(Enum):
    megatron = "megatron"  # Megatron-core, for the models it has a conversion for
    fsdp = "fsdp"  # PyTorch's fully_shard (FSDP2), for causal language models of transformers, and for images


class ReferencePlacement(Enum):
    """How weights that wait in host memory get into the model while it scores: those of the reference policy,
    and those of a teacher's further models."""

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


class KLType(Enum):
    """Estimator of KL(policy || reference) per token, J. Schulman, "Approximating KL divergence"."""

    k1 = "k1"
    k2 = "k2"
    k3 = "k3"


class ImportanceSamplingType(Enum):
    """What happens to importance weights outside [min, max]."""

    tis = "tis"  # they are clamped
    icepop = "icepop"  # they are set to 0
    seq_mask = "seq_mask"  # all weights of a sample are set to 0 when their geometric mean is outside


class CheckpointWriting(Enum):
    """When a checkpoint is written to disk."""

    background = "background"  # from a copy in host memory, while the next step runs
    blocking = "blocking"  # before the next step begins


class TimeoutAction(Enum):
    """What a run does when a stage has missed its deadline."""

    restart = "restart"  # start all processes anew from the latest checkpoint, see cluster.max_restarts
    stop = "stop"  # end with an error


class StorageBackend(Enum):
    """What holds the bytes behind the data plane."""

    simple = "simple"  # TransferQueue's own storage units, reached over ZMQ
    mooncake_cpu = "mooncake_cpu"  # Mooncake segments in host memory, reached over TCP or RDMA
    in_memory = "in_memory"  # the data plane's host, without TransferQueue: for debugging


class MooncakeProtocol(Enum):
    """How Mooncake moves bytes."""

    tcp = "tcp"
    rdma = "rdma"


class WeightTransport(Enum):
    """How weights get from the policy workers to the engines."""

    auto = "auto"  # shared_memory on CPU on one node, cuda_ipc on GPUs if colocated, otherwise collective
    shared_memory = "shared_memory"  # CPU, one node: sender and engines map the same host memory
    cuda_ipc = "cuda_ipc"  # GPU, one node: sender and engines map memory of the sender's GPU
    collective = "collective"  # a broadcast over gloo or NCCL, with one process group per pipeline stage


class Overlap(Enum):
    """What a step computes while its last samples are still generated."""

    off = "off"  # nothing: scoring and training begin when all samples are there
    exact = "exact"  # groups that have ended are scored, and their gradients accumulated


class WeightUpdates(Enum):
    """What happens to samples under way when an engine gets new weights; unused with max_staleness=0."""

    between_samples = "between_samples"  # they end first, and no other begins before the weights are there
    in_flight = "in_flight"  # they stop, and go on with the new weights


class KvCacheAfterUpdate(Enum):
    """The keys and values that samples under way have when they go on with new weights."""

    recompute = "recompute"  # computed anew, by the new weights
    keep = "keep"  # those that they have, of the old weights


class Quantization(Enum):
    fp8 = "fp8"  # linear layers in 8 bits: a scale per output channel, and one per token


class LoraSync(Enum):
    """What reaches the engines when low-rank adapters are trained."""

    merged = "merged"  # the whole model, with the adapters merged into it
    adapter = "adapter"  # the adapters alone; the engines compute them beside the checkpoint's weights


class DatasetKind(Enum):
    arithmetic = "arithmetic"
    jsonl = "jsonl"
    huggingface = "huggingface"
    reasoning_gym = "reasoning_gym"
    environment = "environment"  # the environment that judges them makes them


class EnvironmentKind(Enum):
    """Kinds of environments; ``config.environment_options`` has the options of each."""

    arithmetic = "arithmetic"
    exact_match = "exact_match"
    f1 = "f1"
    regex = "regex"
    json_schema = "json_schema"
    math_verify = "math_verify"
    reasoning_gym = "reasoning_gym"
    function = "function"
    custom = "custom"
    code = "code"
    http = "http"
    reward_model = "reward_model"
    judge = "judge"
    preference = "preference"
    weighted_sum = "weighted_sum"
    calculator = "calculator"
    sliding_puzzle = "sliding_puzzle"
    gymnasium = "gymnasium"
    textarena = "textarena"
    openenv = "openenv"
    verifiers = "verifiers"
    mcp = "mcp"
    agent = "agent"


class AdvantageEstimatorName(Enum):
    """Advantage estimators by name; see docs/rewards.md for their formulas."""

    grpo = "grpo"
    rloo = "rloo"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"
    gdpo = "gdpo"
    gae = "gae"  # of a critic, the group value


class WandbMode(Enum):
    online = "online"
    offline = "offline"
    disabled = "disabled"


class Placement(Enum):
    """Whether engines and policy workers have resources of their own."""

    separate = "separate"  # each has its own
    colocated = "colocated"  # engines run on the nodes and processors, or the GPUs, of the policy workers


class Tripwires(Enum):
    """Which checks of every step look for bugs that raise nothing (docs/tripwires.md)."""

    off = "off"
    cheap = "cheap"  # those that cost at most a hundredth of a step
    all = "all"


class ConsoleMode(Enum):
    """How progress is shown. ``auto`` is ``live`` on a terminal and ``plain`` elsewhere."""

    auto = "auto"
    live = "live"
    plain = "plain"


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    name: str  # one of AdvantageEstimatorName, or a function of your own as package.module:function
    arguments: dict[str, Any]  # the function's own, by name
    reward_weights: dict[str, float]  # estimator gdpo: the weight of each named reward component


@dataclass(kw_only=True, slots=True)
class RewardScalingConfig:
    """A linear map of rewards from [source_min, source_max] to [target_min, target_max]."""

    enabled: bool
    source_min: float
    source_max: float  # above source_min
    target_min: float
    target_max: float  # above target_min
    clamp: bool  # rewards outside the source range are mapped to the nearer end of the target range


@dataclass(kw_only=True, slots=True)
class RewardShapingConfig:
    """What long and truncated responses lose: DAPO's overlong penalty, then the stop-properly penalty."""

    enabled: bool
    # Tokens of all turns: a sample as long as this gets the full penalty; null: the most that it may have.
    max_response_length: int | None
    overlong_buffer_length: int | None  # the penalty grows over so many tokens before; null: no penalty
    overlong_buffer_penalty: float  # the full overlong penalty, reward units
    stop_properly_penalty_coef: float | None  # a truncated response keeps this share of a reward above 0


@dataclass(kw_only=True, slots=True)
class GRPOConfig:
    num_prompts_per_step: int  # P; one step trains on N = P x G samples
    num_generations_per_prompt: int  # G, the group size; >= 2
    max_num_steps: int  # steps of the run; each makes N / policy.train_global_batch_size updates per epoch
    num_epochs_per_rollout: int  # how often a step trains on each of its samples
    overlap: Overlap
    max_staleness: int  # policy versions by which rollouts may be ahead of training; 0: they alternate
    weight_updates: WeightUpdates  # unused with max_staleness=0
    seed: int  # prompts, sampling and initialisation all derive from it
    adv_estimator: AdvantageConfig
    normalize_rewards: bool  # estimator grpo: divide by the group's unbiased std where it is > 0
    mix_groups_in_updates: bool  # an update takes few samples of many prompts, not all samples of a few
    samples_kept_together: int  # of a prompt in one update where groups are mixed, so that they can share it
    use_leave_one_out_baseline: bool  # estimator grpo: baseline is the mean of the other G - 1 rewards
    reward_scaling: RewardScalingConfig
    reward_shaping: RewardShapingConfig
    use_dynamic_sampling: bool  # sample further prompts in place of groups whose raw rewards are all equal
    dynamic_sampling_max_gen_batches: int  # rollouts of P prompts that one step may need at most
    overlong_filtering: bool  # truncated samples do not train
    sample_filters: list[str]  # functions that say which samples train, before dynamic sampling
    skip_idle_samples: bool  # leave samples without a gradient (advantage 0, or masked) out of training
    seq_logprob_error_threshold: float | None  # mask samples whose mean exp|generation - prev| is above it
    max_token_mult_prob_error: float | None  # the run ends at a step whose token_mult_prob_error is above it
    val_period: int  # validate every so many steps; 0: only as the next two keys say
    val_at_start: bool
    val_at_end: bool
    max_val_samples: int  # held-out prompts per validation and source
    num_val_generations_per_prompt: int  # responses to each held-out prompt; pass@k and majority@k need > 1
    val_solved_reward: float  # a response with at least this reward solves its held-out prompt
    val_stop_metric: str  # the run ends when this metric of a validation ...
    val_stop_threshold: float | None  # ... is at least this; null: never


@dataclass(kw_only=True, slots=True)
class LossConfig:
    kind: str  # policy_gradient, sapo, gspo_token, or a loss of your own, package.module:name
    arguments: dict[str, Any]  # the loss's own, by name
    ratio_clip_min: float  # eps_low: the ratio is clipped at 1 - eps_low
    ratio_clip_max: float  # eps_high: the ratio is clipped at 1 + eps_high
    ratio_clip_c: float | None  # dual clip, > 1: where A < 0 the loss is at most -A * c
    disable_ppo_ratio: bool  # REINFORCE: neither ratio nor clipping
    use_cispo: bool  # CISPO: the clipped ratio, without gradient, weighs log p
    sequence_level_importance_ratios: bool  # GSPO: one ratio per sample; needs token_level_loss=false
    force_on_policy_ratio: bool  # the ratio is 1 and prev_logprobs are not computed; one update per rollout
    use_generation_logprobs_as_prev: (
        bool  # the ratio's denominator is the engine's log-probs; prev_logprobs are not computed
    )
    token_level_loss: bool  # the mean over all tokens; false: over each sample's tokens, then over samples
    # Dr.GRPO: a sample's token sum, of all turns, is divided by it, not by its length.
    sequence_length_normalizer: int | None
    entropy_coef: float | None  # entropy bonus; 0 only reports the entropy, null does not compute it
    use_importance_sampling_correction: bool  # weigh token losses (GSPO: samples') by exp(prev - generation)
    truncated_importance_sampling_type: ImportanceSamplingType | None  # how these weights are bounded
    truncated_importance_sampling_ratio: float | None  # upper bound of these weights
    truncated_importance_sampling_ratio_min: float | None  # lower bound of these weights
    reference_policy_kl_penalty: float  # beta, the weight of the KL; 0 keeps no reference model
    reference_policy_kl_type: KLType
    use_kl_in_reward: bool  # REINFORCE++: subtract the KL from the tokens' returns, not add it to the loss


@dataclass(kw_only=True, slots=True)
class MegatronConfig:
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int  # ranks over which every sequence is divided
    expert_model_parallel_size: int  # ranks of a pipeline stage over which a mixture's experts are divided
    sequence_parallel: bool  # needs tensor_model_parallel_size > 1
    use_distributed_optimizer: bool  # shard optimizer state over the data- and context-parallel ranks
    activation_checkpointing: bool  # keep each layer's input only, and recompute the rest in the backward
    moe_grouped_gemm: bool | None  # a mixture's experts in one matrix product; None: where it is fast
    router_replay: bool  # a mixture's routers choose the experts that the engine's chose for the same token
    model_kwargs: dict[str, Any]  # further arguments of Megatron-core's TransformerConfig
    optimizer_kwargs: dict[str, Any]  # further arguments of Megatron-core's OptimizerConfig


@dataclass(kw_only=True, slots=True)
class SequencePackingConfig:
    """Micro-batches in which samples lie end to end, without padding between them."""

    enabled: bool  # not together with dynamic_batching
    train_mb_tokens: int  # at most so many tokens in a micro-batch; the longest sample must fit
    logprob_mb_tokens: int  # the same for the log-prob phases
    share_prompts: bool  # a micro-batch has and counts a prompt once for all its samples of the group


@dataclass(kw_only=True, slots=True)
class DynamicBatchingConfig:
    """Micro-batches of padded samples of similar length, as many samples as a token budget holds."""

    enabled: bool  # not together with sequence_packing
    train_mb_tokens: int  # samples x padded length is at most this; the longest sample must fit
    logprob_mb_tokens: int  # the same for the log-prob phases
    sequence_length_round: int  # padded lengths are multiples of this, so that fewer shapes occur


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Train low-rank adapters beside frozen weights (arXiv 2106.09685).

    generation.lora_sync says what engines get."""

    enabled: bool
    rank: int
    alpha: float  # an adapter's output is multiplied by alpha / rank
    dropout: float  # share of an adapter's input that is zeroed, in training only
    target_modules: list[str]  # last parts of the layers' names; ["all-linear"]: all but the output layer


@dataclass(kw_only=True, slots=True)
class FsdpConfig:
    tensor_parallel_size: int
    activation_checkpointing: bool  # keep each layer's input only, and recompute the rest in the backward
    cpu_offload: bool  # keep sharded weights, gradients and optimizer state in host memory
    reduce_gradients_once: bool  # per update, not per micro-batch; each rank has whole gradients until then
    model_kwargs: dict[str, Any]  # further arguments with which transformers builds the model


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    lr: float  # peak learning rate of AdamW
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    """The learning rate over time, which is counted in optimizer updates, not in steps."""

    warmup_updates: int  # during these the rate grows linearly from 0 to lr
    decay_style: LRDecayStyle
    decay_updates: int  # the update at which min_lr is reached, counted from the start of the warm-up
    min_lr: float


@dataclass(kw_only=True, slots=True)
class PolicyConfig:
    model_name: str  # Hugging Face checkpoint directory; megatron: Llama, Qwen2, Qwen3 or Qwen3-MoE
    backend: PolicyBackend
    device: Device
    precision: Precision
    data_parallel_size: int  # workers = TP x CP x PP x DP
    train_global_batch_size: int  # samples per optimizer update; divides N
    train_micro_batch_size: int  # samples per forward-backward on one rank; unused with a token budget
    logprob_batch_size: int  # samples per forward of the log-prob phases; unused with a token budget
    micro_batch_order: MicroBatchOrder  # unused with a token budget
    sequence_packing: SequencePackingConfig
    dynamic_batching: DynamicBatchingConfig
    max_total_sequence_length: int  # prompt + response, tokens
    max_grad_norm: float
    offload_optimizer_for_logprob: bool  # optimizer state and gradients are on the device only in training
    offload_parameters_between_phases: bool  # weights are on the device only while a phase needs them
    reference_placement: ReferencePlacement  # unused with loss_fn.reference_policy_kl_penalty=0
    replica_fetch: ReplicaFetch
    megatron_cfg: MegatronConfig  # of backend megatron
    fsdp_cfg: FsdpConfig  # of backend fsdp
    lora: LoraConfig
    freeze_vision_tower: bool  # of a model that reads images: only its language model trains
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig


@dataclass(kw_only=True, slots=True)
class ValueConfig(PolicyConfig):
    """The critic of grpo.adv_estimator.name=gae: a worker group of its own, with the policy's keys, whose
    model has one number per token as output. Its workers also estimate the advantages of tokens."""

    num_epochs_per_rollout: int  # how often a step trains the critic on each of its samples
    warmup_steps: int  # in the first steps of a run the critic trains alone
    clip_range: float | None  # an update moves a value at most so far, in units of the reward; null: freely
    gae_gamma: float  # discount per response token, in [0, 1]
    gae_lambda: float  # in [0, 1]: 0 trusts the values alone, 1 the rewards alone
    bootstrap_truncated: bool  # a sample that ran into a limit of tokens ends with its value, not with 0


class TeacherScoring(Enum):
    """What holds a teacher's model and scores samples by it."""

    workers = "workers"
    engine = "engine"


@dataclass(kw_only=True, slots=True)
class TeacherConfig(PolicyConfig):
    """The teacher of loss_fn.kind=distillation: a worker group of its own, with the policy's keys and
    tokenizer. Its models are frozen, so keys of training have no effect."""

    models: dict[str, str]  # checkpoints that score samples of tasks in place of model_name, by env's names
    scored_by: TeacherScoring  # workers of backend, in a layout of their own, or one vLLM engine


@dataclass(kw_only=True, slots=True)
class VllmConfig:
    tensor_parallel_size: int
    enforce_eager: bool  # neither CUDA graphs nor compilation
    max_num_seqs: int  # sequences decoded together in one engine
    kv_cache_gib: float | None  # on CPU: size of the KV cache of one engine
    gpu_memory_utilization: float  # on GPU: share of the device's memory for one engine
    quantization: Quantization | None  # how engines round the weights that they receive; None: not at all


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """Sampling settings that replace the more general ones named where this is used; null: no change."""

    temperature: float | None  # 0 is greedy
    top_p: float | None
    top_k: int | None  # 0: all tokens
    min_p: float | None
    max_new_tokens: int | None  # per turn
    stop_strings: list[str] | None  # a response also ends at the first of these, which stays in it
    stop_token_ids: list[int] | None  # a response also ends with one of these, which is no part of its text


@dataclass(kw_only=True, slots=True)
class GenerationConfig:
    num_engines: int  # independent vLLM engines; prompts are dealt to them round robin
    max_new_tokens: int  # per turn
    temperature: float  # > 0; the trainer's log-probs use the same
    top_p: float
    top_k: int | None  # null: all tokens
    min_p: float
    stop_strings: list[str]  # a response also ends at the first of these, which stays in it
    stop_token_ids: list[int]  # a response also ends with one of these, which is no part of its text
    validation: SamplingConfig  # replaces the settings above in validation
    weight_transport: WeightTransport
    weight_bucket_mib: int  # of cuda_ipc and collective transfers; the sender has two buckets in memory
    weight_delta: bool  # after a first time, send only the values that changed
    lora_sync: LoraSync  # unused with policy.lora.enabled=false
    kv_cache_after_update: KvCacheAfterUpdate  # unused but with grpo.weight_updates=in_flight
    vllm_cfg: VllmConfig
    vllm_kwargs: dict[str, Any]  # further arguments of vLLM's EngineArgs


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    dump_period: int  # write conversations with their rewards to a file every so many steps; 0: never
    dump_validation: bool  # write those of every validation
    record: bool  # keep every training rollout in RUN_DIR/recorded
    record_times: bool  # write when each sample was asked for and came to RUN_DIR/rollout_times.jsonl
    replay: str | None  # train from this directory of recorded rollouts, without generation engines
    generate_only: bool  # sample and reward, but train nothing: there are no policy workers
    keep_messages: bool  # keep the conversation of every sample as the column messages
    # Tokens that a sample may generate in each step that its rollout is ahead; null: no limit.
    max_tokens_per_step: int | None
    journal: bool  # write what depends on timing to RUN_DIR/journal
    follow_journal: str | None  # do things in the order of this run's journal


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """One source of problems."""

    name: str | None  # its name in metrics and messages; null: the last part of its path, or its kind
    kind: DatasetKind
    path: str | None  # jsonl: a file; huggingface: a name, file or directory; reasoning_gym: a dataset's name
    # huggingface, jsonl: a part of it, or of some of its rows, such as train[:100]; a file is one part
    split: str | None
    subset: str | None  # huggingface: the configuration of a dataset that has several, such as main
    prompt_key: str  # jsonl, huggingface: the field with the prompt text
    answer_key: str  # jsonl, huggingface: the field with the reference answer
    images_key: str | None  # jsonl, huggingface: the field with a list of images, see docs/images.md
    digits: int  # arithmetic: digits per operand
    options: dict[str, Any]  # reasoning_gym: arguments of the dataset; environment: size and seed
    weight: float  # in training, its share of the prompts is its weight over the sum of all weights
    prompt_template: str | None  # a text in which {prompt} is replaced by a text prompt
    use_chat_template: bool  # a text prompt becomes the user's message of a conversation
    system_prompt: str | None  # the first message of that conversation
    env: str  # the environment that judges its responses, a key of env
    difficulty_key: str | None  # a field of a problem's data, by whose values an evaluation also reports
    columns: dict[str, str]  # jsonl, huggingface: fields that travel to the trainer, see docs/columns.md


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The sources of problems. ``train`` and ``validation`` are each written as a list or a single source.

    A source takes the keys that it leaves out from ``default``.
    """

    train: list[DatasetConfig]
    validation: list[DatasetConfig]
    default: DatasetConfig
    shuffle: bool
    max_input_seq_length: int | None  # tokens; longer prompts are left out
    chat_template: str | None  # a Jinja file in place of the tokenizer's own template


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    """One task's environment. A source in ``data`` names it by its key in ``env``."""

    kind: EnvironmentKind
    options: dict[str, Any]  # the kind's own, see config.environment_options
    num_actors: int  # processes that judge in parallel; 0 for weighted_sum, whose components judge
    max_concurrency: int  # calls that one actor has under way at once; > 1 only for environments that await
    batch_size: int  # turns judged in one call, whose results arrive together
    timeout_s: float  # deadline of one call; a sample fails when its turn alone takes longer
    max_failed_share: float  # the run ends when a larger share of a step's or a validation's samples failed
    check_at_start: bool  # before the first step, have the first problem's reference answer judged once
    max_turns: int  # responses per conversation; 1 is single-turn
    observation_role: str  # the role under which a chat template renders what the environment says
    max_conversation_tokens: int | None  # null: policy.max_total_sequence_length
    sampling: SamplingConfig  # replaces, for this task, settings of generation
    validation_sampling: SamplingConfig  # in validation, replaces both sampling and generation.validation


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    mode: WandbMode
    project: str
    name: str | None  # null: the run directory's name
    entity: str | None  # the team or user that owns the project; null: that of the API key
    group: str | None  # runs with the same group are shown together
    job_type: str | None
    tags: list[str]
    notes: str | None
    system_metrics: bool  # W&B's own measurements of the driver's node: CPUs, memory, disk, network, GPUs


@dataclass(kw_only=True, slots=True)
class TensorboardConfig:
    enabled: bool  # writes RUN_DIR/tensorboard


@dataclass(kw_only=True, slots=True)
class MlflowConfig:
    enabled: bool  # needs the package mlflow
    tracking_uri: str | None  # null: MLflow's own choice, MLFLOW_TRACKING_URI or its default
    experiment_name: str


@dataclass(kw_only=True, slots=True)
class PrometheusConfig:
    port: int | None  # null: off; else HOST:PORT/metrics has the latest metrics, for Prometheus to fetch
    host: str  # the driver's address that is listened on; whoever reaches it may read the metrics


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """torch's profiler, which writes RUN_DIR/profiles/step_N/PROCESS.json.gz."""

    steps: list[int]
    processes: list[str]  # names as in RUN_DIR/processes.json, also with * and ?; they must load torch


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    log_dir: str  # the run directories are made in it
    run_name: str | None  # null: config name, date and time
    console: ConsoleMode
    num_sample_answers: int  # shown in the summary
    report: bool  # write RUN_DIR/report.html, a page to look at in a browser
    wandb: WandbConfig
    tensorboard: TensorboardConfig
    mlflow: MlflowConfig
    prometheus: PrometheusConfig
    trace_steps: list[int]  # steps of which RUN_DIR/trace_step_N.json shows all processes on a time line
    profile: ProfileConfig
    nvtx_ranges: bool  # engines and workers mark what they do for NVIDIA Nsight Systems


@dataclass(kw_only=True, slots=True)
class CheckpointingConfig:
    enabled: bool  # save the whole run, so that it can be resumed
    resume_if_exists: bool  # a run of the same logger.run_name continues from its latest checkpoint
    checkpoint_dir: str | None  # null: RUN_DIR/checkpoints
    save_period: int  # save every so many steps; 0: only at the end and when asked to stop
    writing: CheckpointWriting
    keep_top_k: int | None  # how many of the best by metric_name to keep besides the latest; null: all
    metric_name: str | None  # as in metrics.jsonl; null: later checkpoints count as better
    higher_is_better: bool
    checkpoint_must_save_by: str | None  # DD:HH:MM:SS after the start: save and stop before it
    export_final_hf: bool  # write RUN_DIR/final_hf, loadable by transformers and vLLM


@dataclass(kw_only=True, slots=True)
class StageTimeoutsConfig:
    """Deadlines of single stages, seconds; null: cluster.stage_timeout_s."""

    weight_sync: float | None
    generation: float | None  # includes the rewards
    logprobs: float | None
    teacher_logprobs: float | None  # of a teacher
    values: float | None  # of a critic
    policy_training: float | None
    value_training: float | None  # of a critic
    checkpoint: float | None  # saving, loading, exporting
    validation: float | None


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    address: str | None  # null: a private Ray on this machine; "auto" or HOST:PORT joins one
    num_cpus: int | None  # logical CPUs of the private Ray; null: what the actors ask for
    num_nodes: int  # machines that the policy workers and engines are on; a private Ray has one
    gpus_per_node: int  # NVIDIA GPUs that the run may use on each of them
    gpu_memory_gib: float | None  # memory of each GPU; null: known only when the run has reserved them
    host_memory_gib: float | None  # memory of each node with GPUs; null: likewise
    placement: Placement  # a tensor-parallel group never leaves its node; --dry-run prints all places
    start_timeout_s: float  # deadline for Ray to start, and then for all actors to be ready
    stage_timeout_s: float  # deadline for each stage that has none of its own in stage_timeouts_s
    stage_timeouts_s: StageTimeoutsConfig
    on_stage_timeout: TimeoutAction
    max_recoveries: int  # how often a dead process, not a policy worker, is replaced and the step redone
    max_restarts: int  # how often all processes start anew from the latest checkpoint after a failure


@dataclass(kw_only=True, slots=True)
class MooncakeConfig:
    """Settings that are read only with data_plane.backend=mooncake_cpu."""

    protocol: MooncakeProtocol
    rdma_devices: str | None  # rdma: names with commas between them; null: all that this node has
    segment_gib: float  # memory of one storage unit; all of them together are the capacity
    buffer_mib: int  # memory that every connected process sets aside for transfers
    master_port: int | None  # TCP port of mooncake_master; null: a free one


@dataclass(kw_only=True, slots=True)
class DataPlaneConfig:
    backend: StorageBackend
    num_storage_units: int
    capacity_gib: float | None  # a put that would store more raises; null: no limit but the backend's own
    timeout_s: float  # deadline for one put, fetch or clear
    max_open_partitions: int  # opening one more waits until another is closed, at most timeout_s
    log_operations: bool  # record metrics data_plane/* of every operation and column
    mooncake_cfg: MooncakeConfig


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    tripwires: Tripwires  # checks of every step, see docs/tripwires.md


@dataclass(kw_only=True, slots=True)
class EvaluationConfig:
    """How a run that only evaluates gets its answers; scripts/evaluate.py makes such runs."""

    step: int  # the answers are sampled with the seeds that a validation after this step has
    base_url: str | None  # of an OpenAI-compatible API that answers in place of engines; null: engines answer
    model: str | None  # the name under which that server has the model
    api_key_variable: str | None  # the environment variable that holds the server's API key; null: no key
    max_parallel: int  # requests to the server that are under way at once
    request_timeout_s: float  # for one attempt
    max_attempts: int  # with pauses that grow between them
    extra_body: dict[str, Any]  # further fields of every request


@dataclass(kw_only=True, slots=True)
class Config:
    grpo: GRPOConfig
    loss_fn: LossConfig
    policy: PolicyConfig
    generation: GenerationConfig
    rollout: RolloutConfig
    data: DataConfig
    env: dict[str, EnvConfig]  # by name; a run starts those that its sources in data name
    logger: LoggerConfig
    checkpointing: CheckpointingConfig
    cluster: ClusterConfig
    data_plane: DataPlaneConfig
    debug: DebugConfig
    value: ValueConfig | None  # left out where there is no critic
    teacher: TeacherConfig | None  # left out where there is no teacher
    evaluation: EvaluationConfig | None  # left out in runs that train or generate
    vars: dict[str, Any]  # a configuration's own variables, for its interpolations: ${vars.name}
