"""Steps that other projects have published, as workloads of this plan.

Layouts, batches and lengths are taken from the publication; values that it leaves out are marked as assumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_like.models.model_info import ModelInfo, planned_shape, read_model_info
from nemo_like_tools.scale_plan.hardware import GPUS, Assumptions, GpuDataSheet
from nemo_like_tools.scale_plan.lengths import Lengths
from nemo_like_tools.scale_plan.recipe_workload import TrainLayout, Workload
from nemo_like_tools.scale_plan.step import StepCost, step_cost
from nemo_like_tools.scale_plan.training import training_cost

_SHAPES = Path(__file__).parent / "shapes"
_NEMO_RL = "NeMo-RL 0.6"  # docs/about/performance-summary.md and its recipes at tag v0.6.0
_NEMO_RL_05 = "NeMo-RL 0.5"  # the same at tag v0.5.0
_VERL = "verl"  # docs/advance/fully_async.md, and the scripts that it names
_NEMO_PROMPT, _VERL_PROMPT = 150, 250  # assumed: mean tokens of a problem with its template
_VERL_MEAN = 3000  # assumed: no publication says how long the responses were
# Shares of HBM that NeMo-RL's engines take on the trainer's GPUs, and on GPUs of their own.
_UTILIZATION = {False: 0.6, True: 0.8}


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedStep:
    """A published step. ``stages_s`` has the published seconds, by this plan's names of stages."""

    source: str
    model: str
    workload: Workload
    step_s: float
    stages_s: dict[str, float] = field(default_factory=dict)
    overlaps: bool = False  # it trains on the last step's samples while it samples
    gpu: GpuDataSheet = GPUS["h100-sxm"]

    @property
    def mode(self) -> str:
        """How generation and training follow one another, in words."""
        return "one step off" if self.overlaps else "synchronous"

    def planned(self, assumptions: Assumptions) -> StepCost:
        """Return this plan's cost of the step. An H20's kernels reach larger shares of its small peak."""
        if self.gpu.name == "h20":
            assumptions = replace(assumptions, matmul_share=0.8, expert_share=0.7, attention_share=0.6)
        return step_cost(self.workload, self.gpu, assumptions)

    def planned_s(self, assumptions: Assumptions) -> float:
        """Return this plan's seconds of the whole step."""
        cost = self.planned(assumptions)
        return cost.overlapped_s if self.overlaps else cost.total_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedTraining:
    """A published rate of training without sampling, in tokens per second and GPU."""

    source: str
    model: str
    workload: Workload
    tokens_per_gpu_s: float

    def planned(self, assumptions: Assumptions) -> float:
        """Return this plan's tokens per second and GPU."""
        cost = training_cost(self.workload, GPUS["h100-sxm"], assumptions)
        return self.workload.num_tokens / cost.training_s / self.workload.train.num_gpus


def shape(name: str) -> ModelInfo:
    """Return the sizes of a model whose config.json is shipped with the recipes or with the script."""
    return read_model_info(str(planned_shape(name) or _SHAPES / name), "megatron")


def published_steps(assumptions: Assumptions) -> list[PublishedStep]:
    """Return the published steps that this plan is compared with."""
    return [*_nemo_rl(assumptions), *_verl(assumptions)]


def published_training() -> list[PublishedTraining]:
    """Return published rates of training, which show how well the training part alone is estimated."""
    # NeMo AutoModel's performance summary, DGX H100, bf16: 512 sequences of 4,096, EP 8, DeepEP.
    workload = Workload(
        model=shape("Qwen3-30B-A3B"),
        num_gpus=8,
        train=TrainLayout(dp=8, ep=8, train_mb_tokens=16384),
        num_engines=1,
        engine_tp=1,
        num_prompts=512,
        group_size=1,
        prompt_tokens=4093,
        lengths=Lengths(mean=2.9, longest=3, sigma=0.01),
        updates=1,
        logprob_phases=0,
    )
    return [
        PublishedTraining(
            source="NeMo AutoModel", model="Qwen3-30B-A3B", workload=workload, tokens_per_gpu_s=12_040
        )
    ]


@dataclass(frozen=True, slots=True)
class _NemoBatch:
    """The batch of a step of NeMo-RL's performance recipes, with 32 responses to each prompt."""

    num_prompts: int
    longest_sample: int
    updates: int


def _nemo_rl(assumptions: Assumptions) -> list[PublishedStep]:
    small = _NemoBatch(num_prompts=64, longest_sample=4096, updates=4)
    large = _NemoBatch(num_prompts=16, longest_sample=8192, updates=1)
    llama = TrainLayout(dp=8, recomputes=True, train_mb_tokens=4096, logprob_mb_tokens=16384)
    mixture = TrainLayout(dp=32, ep=8, train_mb_tokens=4096, logprob_mb_tokens=16384)
    big = TrainLayout(
        tp=2, cp=2, pp=8, dp=8, ep=16, recomputes=True, train_mb_tokens=8192, logprob_mb_tokens=8192
    )

    def step(
        source: str,
        step_s: float,
        model: str,
        batch: _NemoBatch,
        train: TrainLayout,
        *,
        engine_tp: int,
        tokens: float,
        overlaps: bool = False,
    ) -> PublishedStep:
        load = Workload(
            model=shape(model),
            # Engines have the trainer's GPUs, or as many of their own.
            num_gpus=train.num_gpus * (2 if overlaps else 1),
            shares_gpus=not overlaps,
            hbm_utilization=_UTILIZATION[overlaps],
            train=train,
            num_engines=train.num_gpus // engine_tp,
            engine_tp=engine_tp,
            num_prompts=batch.num_prompts,
            group_size=32,
            prompt_tokens=_NEMO_PROMPT,
            lengths=Lengths(
                mean=tokens - _NEMO_PROMPT,
                longest=batch.longest_sample - _NEMO_PROMPT,
                sigma=assumptions.length_sigma,
            ),
            updates=batch.updates,
            logprob_phases=2,  # its base configuration has a KL penalty of 0.01
            storage_units=train.num_gpus // 8,
        )
        return PublishedStep(source=source, model=model, workload=load, step_s=step_s, overlaps=overlaps)

    llama_8b, qwen_30b, qwen_235b = "Llama-3.1-8B-Instruct", "Qwen3-30B-A3B", "Qwen3-235B-A22B"
    two_stages, four_replicas = replace(mixture, pp=2, dp=8), replace(big, dp=4)
    wide = replace(big, tp=4, cp=1, dp=4)
    return [
        step(_NEMO_RL_05, 92.8, llama_8b, small, replace(llama, pp=2), engine_tp=1, tokens=1019),
        step(_NEMO_RL_05, 64.8, llama_8b, small, llama, engine_tp=1, tokens=1123, overlaps=True),
        step(_NEMO_RL, 192, qwen_30b, small, mixture, engine_tp=2, tokens=3203),
        step(_NEMO_RL, 152, qwen_30b, small, two_stages, engine_tp=2, tokens=3201, overlaps=True),
        step(_NEMO_RL, 395, qwen_235b, large, four_replicas, engine_tp=16, tokens=5698),
        step(_NEMO_RL, 312, qwen_235b, large, big, engine_tp=16, tokens=5713),
        step(_NEMO_RL, 231, qwen_235b, large, wide, engine_tp=8, tokens=5721, overlaps=True),
    ]


def _verl(assumptions: Assumptions) -> list[PublishedStep]:
    def step(model: str, step_s: float, stages_s: dict[str, float], **workload: Any) -> PublishedStep:
        longest, num_gpus = workload.pop("longest"), workload["train"].num_gpus
        load = Workload(
            model=shape(model),
            num_gpus=num_gpus,
            shares_gpus=True,
            hbm_utilization=0.8,
            num_engines=num_gpus // 4,
            engine_tp=4,
            num_prompts=512,
            group_size=16,
            prompt_tokens=_VERL_PROMPT,
            lengths=Lengths(mean=_VERL_MEAN, longest=longest, sigma=assumptions.length_sigma),
            storage_units=num_gpus // 8,
            **workload,
        )
        return PublishedStep(
            source=_VERL, model=model, workload=load, step_s=step_s, stages_s=stages_s, gpu=GPUS["h20"]
        )

    mixture = TrainLayout(tp=2, cp=2, dp=32, ep=8, recomputes=True, train_mb_tokens=10240)
    dense = [
        (32, 790.10, 357.41, 107.71, 269.80),
        (64, 365.28, 150.72, 70.26, 133.41),
        (128, 356.30, 177.85, 53.92, 113.81),
    ]
    return [
        step(
            "Qwen3-30B-A3B",
            497.89,
            {"generation": 348.05, "log-probs": 28.73 + 20.86, "training": 86.27},
            train=mixture,
            longest=8 * 1024,
            updates=4,
            logprob_phases=2,
        ),
        *(
            step(
                "Qwen2.5-Math-7B",
                step_s,
                {"generation": generation_s, "log-probs": logprobs_s, "training": training_s},
                train=TrainLayout(cp=4, dp=num_gpus // 4, recomputes=True, train_mb_tokens=61440),
                longest=28 * 1024,
                updates=16,
                logprob_phases=1,
            )
            for num_gpus, step_s, generation_s, logprobs_s, training_s in dense
        ),
    ]
