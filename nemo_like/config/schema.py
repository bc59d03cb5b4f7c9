"""The typed configuration: every key, its type, its unit and its rule.

Values live in ``configs/`` (one commented default per group); no field here has a default, so a
default is written down in exactly one place. ``config.loader`` merges YAML and overrides into these
classes, ``config.rules`` checks the rules that span several keys.

Names follow NeMo-RL where it has one, so that runs can be compared.
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
    fsdp = "fsdp"  # PyTorch's fully_shard (FSDP2), for any causal language model of transformers


class ReferencePlacement(Enum):
    """Where the weights of the reference policy are while it does not score: never on the device."""

    host_copy = "host_copy"  # frozen on the host; the policy's own weights wait beside it: two models there
    swap_in_place = "swap_in_place"  # changes places with the policy's weights tensor by tensor: one model


class ReplicaFetch(Enum):
    """Who gets a replica's samples from the data plane."""

    leader = "leader"  # one fetch per replica, then a broadcast inside it
    every_rank = "every_rank"  # a fetch by each of the replica's workers


class MicroBatchOrder(Enum):
    """Which samples share a micro-batch of fixed size."""

    by_length = "by_length"  # those of like length, longest first: little padding
    as_sampled = "as_sampled"  # neighbours in the batch, as other frameworks do


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

    tis = "tis"  # clamped
    icepop = "icepop"  # zeroed
    seq_mask = "seq_mask"  # samples are zeroed whose geometric mean is outside


class CheckpointWriting(Enum):
    """When a checkpoint reaches the disk."""

    background = "background"  # while the next step runs, from a copy in host memory
    blocking = "blocking"  # before the next step


class TimeoutAction(Enum):
    """What a run does when a stage has missed its deadline."""

    restart = "restart"  # all processes again, from the latest checkpoint, cluster.max_restarts times at most
    stop = "stop"


class StorageBackend(Enum):
    """What holds the bytes behind the data plane."""

    simple = "simple"  # TransferQueue's own storage units, over ZMQ
    mooncake_cpu = "mooncake_cpu"  # Mooncake segments in host memory, over TCP or RDMA
    in_memory = "in_memory"  # the data plane's host itself, without TransferQueue: for debugging


class MooncakeProtocol(Enum):
    """How Mooncake moves bytes."""

    tcp = "tcp"
    rdma = "rdma"


class WeightTransport(Enum):
    """How weights get from the policy workers to the engines."""

    auto = "auto"  # memory that sender and engines map: on CPU if all are on one node, on GPUs if colocated
    shared_memory = "shared_memory"  # CPU, one node: mapped by sender and engines, nothing is sent
    cuda_ipc = "cuda_ipc"  # GPU, one node: the same with memory of the sender's GPU
    collective = "collective"  # a broadcast over gloo or NCCL, one group per pipeline stage


class DatasetKind(Enum):
    arithmetic = "arithmetic"
    jsonl = "jsonl"
    huggingface = "huggingface"
    reasoning_gym = "reasoning_gym"


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
    calculator = "calculator"
    sliding_puzzle = "sliding_puzzle"


class AdvantageEstimatorName(Enum):
    """Advantage estimators by name; see docs/rewards.md for their formulas."""

    grpo = "grpo"
    rloo = "rloo"
    reinforce_plus_plus = "reinforce_plus_plus"
    reinforce_plus_plus_baseline = "reinforce_plus_plus_baseline"
    gdpo = "gdpo"


class WandbMode(Enum):
    online = "online"
    offline = "offline"
    disabled = "disabled"


class Placement(Enum):
    """Whether generation and training have resources of their own."""

    separate = "separate"
    colocated = "colocated"  # engines run on the nodes and processors, or the GPUs, of the policy workers


class ConsoleMode(Enum):
    """``auto`` is ``live`` on a terminal and ``plain`` elsewhere."""

    auto = "auto"
    live = "live"
    plain = "plain"


@dataclass(kw_only=True, slots=True)
class AdvantageConfig:
    name: str  # one of AdvantageEstimatorName, or a function of one's own as package.module:function
    reward_weights: dict[str, float]  # gdpo: the weight of each named reward component


@dataclass(kw_only=True, slots=True)
class RewardScalingConfig:
    """Linear map from [source_min, source_max] to [target_min, target_max]."""

    enabled: bool
    source_min: float
    source_max: float  # above source_min
    target_min: float
    target_max: float  # above target_min
    clamp: bool  # rewards outside the source range end at the ends of the target range


@dataclass(kw_only=True, slots=True)
class RewardShapingConfig:
    """DAPO's overlong penalty, then the stop-properly penalty."""

    enabled: bool
    max_response_length: int  # tokens; here the overlong penalty is whole
    overlong_buffer_length: int | None  # tokens before it over which the penalty grows; null: no penalty
    overlong_buffer_penalty: float  # reward units
    stop_properly_penalty_coef: float | None  # truncated responses keep this share of a reward above 0


@dataclass(kw_only=True, slots=True)
class GRPOConfig:
    num_prompts_per_step: int  # P; one step trains on N = P x G samples
    num_generations_per_prompt: int  # G, the group size; >= 2
    max_num_steps: int  # rollout steps; each makes N / policy.train_global_batch_size updates an epoch
    num_epochs_per_rollout: int  # training passes over the samples of a step
    seed: int  # prompts, sampling and initialisation all derive from it
    adv_estimator: AdvantageConfig
    normalize_rewards: bool  # estimator grpo: divide by the group's unbiased std where it is > 0
    mix_groups_in_updates: bool  # an update takes few samples of many prompts, not all samples of a few
    samples_kept_together: int  # of a prompt where groups are mixed, so that an update's can share it
    use_leave_one_out_baseline: bool  # estimator grpo: baseline is the mean of the other G - 1 rewards
    reward_scaling: RewardScalingConfig
    reward_shaping: RewardShapingConfig
    use_dynamic_sampling: bool  # replace groups whose raw rewards are all equal by further ones
    dynamic_sampling_max_gen_batches: int  # rollouts of P prompts that one step may need at most
    overlong_filtering: bool  # truncated samples do not train
    skip_idle_samples: bool  # compute nothing for samples without a gradient: advantage 0, or masked
    seq_logprob_error_threshold: float | None  # mask samples whose mean exp|generation - prev| is above
    max_token_mult_prob_error: float | None  # a step above it ends the run
    val_period: int  # validate every so many steps; 0: only where the next two say
    val_at_start: bool
    val_at_end: bool
    max_val_samples: int  # held-out prompts per validation and source
    num_val_generations_per_prompt: int  # responses to each; above 1 for pass@k and majority@k
    val_solved_reward: float  # a held-out prompt is solved by a response with at least this reward
    val_stop_metric: str  # the run ends when this metric of a validation ...
    val_stop_threshold: float | None  # ... is at least this; null: never


@dataclass(kw_only=True, slots=True)
class LossConfig:
    kind: str  # policy_gradient, which the keys below describe; or one of your own, package.module:name
    ratio_clip_min: float  # eps_low: the ratio is clipped at 1 - eps_low
    ratio_clip_max: float  # eps_high: the ratio is clipped at 1 + eps_high
    ratio_clip_c: float | None  # dual clip, > 1: where A < 0 the loss is at most -A * c
    disable_ppo_ratio: bool  # REINFORCE: neither ratio nor clipping
    use_cispo: bool  # CISPO: the clipped ratio, without gradient, weighs log p
    sequence_level_importance_ratios: bool  # GSPO: one ratio per sample; needs token_level_loss=false
    force_on_policy_ratio: bool  # the ratio is 1 and prev_logprobs are not computed; one update per rollout
    use_generation_logprobs_as_prev: (
        bool  # the ratio is to the engine's log-probs; prev_logprobs are not computed
    )
    token_level_loss: bool  # mean over tokens; else over each sample's tokens, then over samples
    sequence_length_normalizer: int | None  # Dr.GRPO: divides a sample's token sum instead of its length
    entropy_coef: float | None  # entropy bonus; 0 only reports the entropy, null does not compute it
    use_importance_sampling_correction: bool  # weigh token losses (GSPO: samples') by exp(prev - generation)
    truncated_importance_sampling_type: ImportanceSamplingType | None  # how these weights are bounded
    truncated_importance_sampling_ratio: float | None  # upper bound
    truncated_importance_sampling_ratio_min: float | None  # lower bound
    reference_policy_kl_penalty: float  # beta; 0 needs no reference model
    reference_policy_kl_type: KLType
    use_kl_in_reward: bool  # REINFORCE++: the KL is taken from the token's return instead of the loss


@dataclass(kw_only=True, slots=True)
class MegatronConfig:
    tensor_model_parallel_size: int
    pipeline_model_parallel_size: int
    context_parallel_size: int  # cuts every sequence over so many ranks
    expert_model_parallel_size: int  # cuts the experts of a mixture over so many ranks of a stage
    sequence_parallel: bool  # needs tensor_model_parallel_size > 1
    use_distributed_optimizer: bool  # shard optimizer state over the data- and context-parallel ranks
    activation_checkpointing: bool  # keep a layer's input only and compute it again in the backward pass


@dataclass(kw_only=True, slots=True)
class SequencePackingConfig:
    """Micro-batches of samples end to end, without padding between them."""

    enabled: bool  # not together with dynamic_batching
    train_mb_tokens: int  # tokens of a micro-batch at most; the longest sample must fit
    logprob_mb_tokens: int  # the same for the log-prob phases
    share_prompts: bool  # a group's samples hold their prompt once, in the model and in the budget


@dataclass(kw_only=True, slots=True)
class DynamicBatchingConfig:
    """Micro-batches of samples of like length, as many as a token budget holds once padded."""

    enabled: bool  # not together with sequence_packing
    train_mb_tokens: int  # samples x padded length of a micro-batch at most; the longest sample must fit
    logprob_mb_tokens: int  # the same for the log-prob phases
    sequence_length_round: int  # padded lengths are multiples of it, so that fewer shapes occur


@dataclass(kw_only=True, slots=True)
class LoraConfig:
    """Train low-rank adapters beside frozen weights (arXiv 2106.09685); engines get the merged weights."""

    enabled: bool
    rank: int
    alpha: float  # an adapter's output is multiplied by alpha / rank
    dropout: float  # on an adapter's input, in training only
    target_modules: list[str]  # last parts of the layers' names; ["all-linear"]: all but the output layer


@dataclass(kw_only=True, slots=True)
class FsdpConfig:
    tensor_parallel_size: int
    activation_checkpointing: bool  # keep each layer's input alone, and recompute the rest in the backward
    cpu_offload: bool  # sharded weights, gradients and optimizer state in host memory
    lora: LoraConfig


@dataclass(kw_only=True, slots=True)
class OptimizerConfig:
    lr: float  # peak learning rate of AdamW
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    adam_eps: float


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    """Counted in optimizer updates, not in rollout steps."""

    warmup_updates: int  # linear from 0 to lr
    decay_style: LRDecayStyle
    decay_updates: int  # update at which min_lr is reached, warm-up included
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
    logprob_batch_size: int  # samples per forward of the log-prob phases on one rank; likewise
    micro_batch_order: MicroBatchOrder  # likewise
    sequence_packing: SequencePackingConfig
    dynamic_batching: DynamicBatchingConfig
    max_total_sequence_length: int  # prompt + response, tokens
    max_grad_norm: float
    offload_optimizer_for_logprob: bool  # its state and the gradients are on the device in training alone
    offload_parameters_between_phases: bool  # the weights are on the device while a phase needs them
    reference_placement: ReferencePlacement  # unused with loss_fn.reference_policy_kl_penalty=0
    replica_fetch: ReplicaFetch
    megatron_cfg: MegatronConfig  # of backend megatron
    fsdp_cfg: FsdpConfig  # of backend fsdp
    optimizer: OptimizerConfig
    scheduler: SchedulerConfig


@dataclass(kw_only=True, slots=True)
class VllmConfig:
    tensor_parallel_size: int
    enforce_eager: bool
    max_num_seqs: int  # sequences decoded together in one engine
    kv_cache_gib: float | None  # CPU: size of the KV cache of one engine
    gpu_memory_utilization: float  # GPU: share of the device's memory for one engine


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """Deviations from the sampling settings above it; null: as there."""

    temperature: float | None  # 0 is greedy
    top_p: float | None
    top_k: int | None  # 0: all tokens
    min_p: float | None
    max_new_tokens: int | None  # per turn
    stop_strings: list[str] | None  # a response also ends with the first of these, which stays in it


@dataclass(kw_only=True, slots=True)
class GenerationConfig:
    num_engines: int  # independent vLLM engines; prompts are dealt round robin
    max_new_tokens: int  # per turn
    temperature: float  # > 0; trainer log-probs use the same
    top_p: float
    top_k: int | None  # null: all tokens
    min_p: float
    stop_strings: list[str]  # a response also ends with the first of these, which stays in it
    validation: SamplingConfig  # where validation deviates
    weight_transport: WeightTransport
    weight_bucket_mib: int  # size of a broadcast; the memory that a collective transfer takes twice
    vllm_cfg: VllmConfig


@dataclass(kw_only=True, slots=True)
class RolloutConfig:
    dump_period: int  # conversations with their rewards are written down every so many steps; 0: never
    record: bool  # keep every training rollout in RUN_DIR/recorded
    replay: str | None  # train from this directory of recorded rollouts, without generation engines
    generate_only: bool  # sample and reward, without policy workers


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """One source of problems."""

    name: str | None  # in metrics and messages; null: the last part of its path, or its kind
    kind: DatasetKind
    path: str | None  # jsonl: a file; huggingface: a name, file or directory; reasoning_gym: a dataset's name
    split: str | None  # huggingface only
    prompt_key: str  # jsonl, huggingface: the field with the prompt text
    answer_key: str  # jsonl, huggingface: the field with the reference answer
    digits: int  # arithmetic: digits per operand
    options: dict[str, Any]  # reasoning_gym: arguments of the dataset
    weight: float  # training: its share of the prompts is its weight over the sum of all
    prompt_template: str | None  # a text prompt is put in the place of {prompt}
    use_chat_template: bool  # a text prompt becomes the user's message of a conversation
    system_prompt: str | None  # the conversation's first message
    env: str  # the environment that judges it, a key of env
    columns: dict[str, str]  # jsonl, huggingface: fields that travel to the trainer, see docs/columns.md


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """``train`` and ``validation`` are written as a list or as a single source; what a source leaves out
    it takes from ``default``."""

    train: list[DatasetConfig]
    validation: list[DatasetConfig]
    default: DatasetConfig
    shuffle: bool
    max_input_seq_length: int | None  # tokens; longer prompts are left out
    chat_template: str | None  # a Jinja file in place of the tokenizer's own template


@dataclass(kw_only=True, slots=True)
class EnvConfig:
    """One task's environment. ``data`` sources name it by its key in ``env``."""

    kind: EnvironmentKind
    options: dict[str, Any]  # the kind's own, see config.environment_options
    num_actors: int  # processes of this environment's pool
    max_concurrency: int  # calls that one actor works on at the same time; above 1 only for what awaits
    batch_size: int  # turns of one call, which wait for each other
    timeout_s: float  # deadline of one call; a reward that takes longer alone fails its sample
    max_failed_share: float  # of the samples of a step or validation; with more failures the run ends
    check_at_start: bool  # ask once before the first step, about the first problem and its own answer
    max_turns: int  # responses per conversation; 1 is single-turn
    observation_role: str  # under which a chat template renders what the environment says
    max_conversation_tokens: int | None  # null: policy.max_total_sequence_length
    sampling: SamplingConfig  # where this task deviates from generation
    validation_sampling: SamplingConfig  # and, in validation, from the above and generation.validation


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    mode: WandbMode
    project: str
    name: str | None  # null: the run directory's name
    entity: str | None  # the team or user; null: the key's own
    group: str | None  # runs that belong together
    job_type: str | None
    tags: list[str]
    notes: str | None
    system_metrics: bool  # W&B's own of this node: processors, memory, disk, network, GPUs


@dataclass(kw_only=True, slots=True)
class TensorboardConfig:
    enabled: bool  # writes RUN_DIR/tensorboard


@dataclass(kw_only=True, slots=True)
class MlflowConfig:
    enabled: bool  # needs the package mlflow
    tracking_uri: str | None  # null: MLflow's own choice, MLFLOW_TRACKING_URI or its default
    experiment_name: str


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """torch's profiler: RUN_DIR/profiles/step_N/PROCESS.json.gz."""

    steps: list[int]
    processes: list[str]  # names as in RUN_DIR/processes.json, with * and ?; of processes that load torch


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    log_dir: str  # a run directory is made below it
    run_name: str | None  # null: config name, date and time
    console: ConsoleMode
    num_sample_answers: int  # shown in the summary
    wandb: WandbConfig
    tensorboard: TensorboardConfig
    mlflow: MlflowConfig
    trace_steps: list[int]  # steps whose time line over all processes is written: RUN_DIR/trace_step_N.json
    profile: ProfileConfig
    nvtx_ranges: bool  # engines and workers name what they do for NVIDIA Nsight Systems


@dataclass(kw_only=True, slots=True)
class CheckpointingConfig:
    enabled: bool  # save the whole run, so that it can be resumed
    resume_if_exists: bool  # a run of the same logger.run_name continues from its latest checkpoint
    checkpoint_dir: str | None  # null: RUN_DIR/checkpoints
    save_period: int  # save every so many steps; 0: only at the end and when asked to stop
    writing: CheckpointWriting
    keep_top_k: int | None  # the best by metric_name, besides the latest; null keeps all
    metric_name: str | None  # name in metrics.jsonl; null: the latest are the best
    higher_is_better: bool
    checkpoint_must_save_by: str | None  # DD:HH:MM:SS after the start: save and stop before it
    export_final_hf: bool  # write RUN_DIR/final_hf, loadable by transformers and vLLM


@dataclass(kw_only=True, slots=True)
class StageTimeoutsConfig:
    """Deadlines of single stages, seconds; null: cluster.stage_timeout_s."""

    weight_sync: float | None
    generation: float | None  # with the rewards
    logprobs: float | None
    policy_training: float | None
    checkpoint: float | None  # saving, loading, exporting
    validation: float | None


@dataclass(kw_only=True, slots=True)
class ClusterConfig:
    address: str | None  # null: a private Ray on this machine; "auto" or HOST:PORT joins one
    num_cpus: int | None  # logical CPUs of the private Ray; null: what the actors ask for
    num_gpus: int  # GPUs of the private Ray
    placement: Placement  # a tensor-parallel group never leaves its node; the groups spread over nodes
    start_timeout_s: float  # deadline for Ray, and then for all actors to be ready
    stage_timeout_s: float  # deadline for one stage of a step that has none of its own
    stage_timeouts_s: StageTimeoutsConfig
    on_stage_timeout: TimeoutAction
    max_recoveries: int  # a process that died is replaced and the step done again; a policy worker never is
    max_restarts: int  # of all processes from the latest checkpoint, after one died or missed a deadline


@dataclass(kw_only=True, slots=True)
class MooncakeConfig:
    """Read with data_plane.backend=mooncake_cpu only."""

    protocol: MooncakeProtocol
    rdma_devices: str | None  # rdma: names with commas between them; null: all that this node has
    segment_gib: float  # memory of one storage unit; all of them together are the capacity
    buffer_mib: int  # what every process that connects sets aside for transfers
    master_port: int | None  # of mooncake_master; null: a free one


@dataclass(kw_only=True, slots=True)
class DataPlaneConfig:
    backend: StorageBackend
    num_storage_units: int
    capacity_gib: float | None  # a put that would store more raises; null: no limit but the backend's own
    timeout_s: float  # deadline for one put, fetch or clear
    max_open_partitions: int  # opening one more waits until another is closed, at most timeout_s
    log_operations: bool  # metrics data_plane/* of every operation and column
    mooncake_cfg: MooncakeConfig


@dataclass(kw_only=True, slots=True)
class Config:
    grpo: GRPOConfig
    loss_fn: LossConfig
    policy: PolicyConfig
    generation: GenerationConfig
    rollout: RolloutConfig
    data: DataConfig
    env: dict[str, EnvConfig]  # by name; a run starts those that its data name
    logger: LoggerConfig
    checkpointing: CheckpointingConfig
    cluster: ClusterConfig
    data_plane: DataPlaneConfig
