"""A step's batch, and the layout that computes it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from nemo_like.algorithms.loss_traits import scores_prev_logprobs
from nemo_like.configuration import Config
from nemo_like.models.model_info import ModelInfo
from nemo_like.plan.derived import shares_gpus
from nemo_like.plan.plan import updates_per_step
from nemo_like.policy.groups.layout import num_chunks, policy_world_size
from nemo_like.policy.options import PolicyConfig
from nemo_like_tools.scale_plan.hardware import Assumptions
from nemo_like_tools.scale_plan.lengths import Lengths


class Scaling(Enum):
    """Says how a recipe's batch changes with the number of GPUs."""

    weak = "weak"  # as many prompts per GPU, and as many updates a step
    strong = "strong"  # the same batch


class LayoutError(ValueError):
    """A recipe cannot run on a number of GPUs. The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainLayout:
    """The layout of the trainer, in the words of ``policy.megatron_cfg``."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    dp: int
    ep: int = 1
    recomputes: bool = False
    train_mb_tokens: int = 16384
    logprob_mb_tokens: int = 65536

    @property
    def replica(self) -> int:
        """The GPUs of one replica."""
        return self.tp * self.cp * self.pp

    @property
    def num_gpus(self) -> int:
        """The GPUs of the trainer."""
        return self.replica * self.dp


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step: what is sampled and trained, and on which GPUs."""

    model: ModelInfo
    num_gpus: int
    train: TrainLayout
    num_engines: int
    engine_tp: int
    num_prompts: int
    group_size: int
    prompt_tokens: int
    lengths: Lengths
    updates: int
    logprob_phases: int
    max_num_seqs: int = 256
    hbm_utilization: float = 0.85
    linear_bytes: int = 2  # of a weight that engines hold outside of embeddings: bfloat16, or 1 in 8 bits
    storage_units: int = 1
    shares_gpus: bool = False  # engines and trainer in turn on the same GPUs

    @property
    def num_samples(self) -> int:
        """Samples of the step."""
        return self.num_prompts * self.group_size

    @property
    def sample_tokens(self) -> float:
        """The mean length of a sample, prompt and response."""
        return self.prompt_tokens + self.lengths.mean

    @property
    def num_tokens(self) -> float:
        """Tokens of the step; each sample counts its prompt."""
        return self.num_samples * self.sample_tokens

    @property
    def longest_sample(self) -> float:
        """The expected length of the longest sample of the step."""
        return self.prompt_tokens + self.lengths.quantile((self.num_samples - 0.5) / self.num_samples)

    @property
    def mean_context(self) -> float:
        """The mean number of tokens to which a token attends, over all tokens of all samples."""
        prompt = self.prompt_tokens
        square = prompt**2 + 2 * prompt * self.lengths.mean + self.lengths.mean_square
        return square / self.sample_tokens / 2


def scaled(
    cfg: Config, model: ModelInfo, num_gpus: int, scaling: Scaling, assumptions: Assumptions
) -> Workload:
    """Return a recipe's step on ``num_gpus`` GPUs.

    Trainer and engines keep their shares of the GPUs, and replicas and engines keep their sizes; the numbers
    of replicas and engines change. Raises LayoutError when this is not possible.
    """
    recipe_gpus = cfg.cluster.num_nodes * cfg.cluster.gpus_per_node
    if not recipe_gpus or cfg.policy.backend != "megatron":
        raise LayoutError("only recipes of Megatron-core on GPUs are planned")
    if cfg.generation.vllm_cfg.pipeline_parallel_size > 1:
        raise LayoutError("only engines without pipeline stages are planned")
    engine_tp = cfg.generation.vllm_cfg.tensor_parallel_size
    train_gpus = num_gpus * policy_world_size(cfg.policy) // recipe_gpus
    engine_gpus = num_gpus * cfg.generation.num_engines * engine_tp // recipe_gpus
    growth = num_gpus / recipe_gpus if scaling is Scaling.weak else 1.0
    workload = Workload(
        model=model,
        num_gpus=num_gpus,
        train=_train_layout(cfg.policy, train_gpus),
        num_engines=engine_gpus // engine_tp,
        engine_tp=engine_tp,
        num_prompts=round(cfg.grpo.num_prompts_per_step * growth),
        group_size=cfg.grpo.num_generations_per_prompt,
        prompt_tokens=assumptions.prompt_tokens,
        lengths=Lengths(
            mean=assumptions.mean_response_share * cfg.generation.max_new_tokens,
            longest=cfg.generation.max_new_tokens,
            sigma=assumptions.length_sigma,
        ),
        updates=updates_per_step(cfg),
        logprob_phases=scores_prev_logprobs(cfg.loss_fn) + (cfg.loss_fn.reference_policy_kl_penalty > 0),
        max_num_seqs=cfg.generation.vllm_cfg.max_num_seqs,
        hbm_utilization=cfg.generation.vllm_cfg.gpu_memory_utilization,
        linear_bytes=2 if cfg.generation.vllm_cfg.quantization is None else 1,
        storage_units=max(1, num_gpus // cfg.cluster.gpus_per_node),
        shares_gpus=shares_gpus(cfg),
    )
    _check(workload, train_gpus)
    return workload


def _train_layout(policy: PolicyConfig, num_gpus: int) -> TrainLayout:
    megatron = policy.megatron_cfg
    if megatron.expert_tensor_parallel_size > 1:
        raise LayoutError("only experts that are whole on a rank are planned")
    if num_chunks(policy) > 1:
        raise LayoutError("only a pipeline whose stages are one piece each is planned")
    return TrainLayout(
        tp=megatron.tensor_model_parallel_size,
        cp=megatron.context_parallel_size,
        pp=megatron.pipeline_model_parallel_size,
        dp=max(1, num_gpus // (policy_world_size(policy) // policy.data_parallel_size)),
        ep=megatron.expert_model_parallel_size,
        recomputes=megatron.activation_checkpointing,
        train_mb_tokens=policy.sequence_packing.train_mb_tokens,
        logprob_mb_tokens=policy.sequence_packing.logprob_mb_tokens,
    )


def _check(workload: Workload, train_gpus: int) -> None:
    train = workload.train
    if train.num_gpus != train_gpus:
        raise LayoutError(f"{train_gpus} training GPUs are no multiple of a replica's {train.replica}")
    stage = train.tp * train.cp * train.dp
    if stage % train.ep:
        raise LayoutError(f"experts need {train.ep} training GPUs per pipeline stage, there are {stage}")
    if workload.num_engines < 1:
        raise LayoutError(f"no GPUs are left for an engine of {workload.engine_tp}")
    if workload.num_samples < workload.updates * train.dp:
        raise LayoutError(f"an update has fewer samples than the {train.dp} replicas")
