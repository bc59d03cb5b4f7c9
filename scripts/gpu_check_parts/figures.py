"""The figures of a run, from its metrics: seconds and tokens per stage, weight syncs, mismatch, accuracy."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from nemo_like.models.model_arithmetic import forward_flops_per_token, training_flops_per_token
from nemo_like.models.model_info import ModelInfo
from nemo_like_tools.scale_plan.hardware import GPUS
from scripts.gpu_check_parts.run_files import Record

STAGES = ("weight_sync", "generation", "logprobs", "policy_training")
# The first steps also compile kernels and fill caches.
_WARM_UP_STEPS = 2


def peak_flops(gpu_name: str) -> float | None:
    """Return the peak FLOP/s in bfloat16 of a GPU of this name; None where it is not known."""
    known = {"H200": "h200", "H100 80GB HBM3": "h100-sxm", "H20": "h20", "A100": "a100-sxm"}
    for words, key in known.items():
        if re.search(rf"(?<!\w){words}(?!\w)", gpu_name) and key in GPUS:
            return GPUS[key].bf16_flops_per_s
    return None


def warm(steps: Sequence[Record]) -> Sequence[Record]:
    """Return the steps without the first ones, where enough are left."""
    return steps[_WARM_UP_STEPS:] if len(steps) > 2 * _WARM_UP_STEPS else steps


def stage_figures(
    steps: Sequence[Record], model: ModelInfo, peak: float | None
) -> dict[str, dict[str, float]]:
    """Return, by stage, the median ``seconds``, ``tokens_per_s`` and ``peak_share`` of a step.

    ``peak`` is the peak FLOP/s of all GPUs that train. Tokens are those of responses in generation, all in
    log-probs and training. A share of peak is there for these two, where all samples trained. Times are whole
    stages, data plane included.
    """
    figures: dict[str, dict[str, float]] = {}
    for stage in STAGES:
        timed = [step for step in steps if step.get(f"timing/train/{stage}")]
        if not timed:
            continue
        one = {"seconds": statistics.median(step[f"timing/train/{stage}"] for step in timed)}
        if stage != "weight_sync":
            one["tokens_per_s"] = statistics.median(
                _tokens(step, stage) / step[f"timing/train/{stage}"] for step in timed
            )
        trained_all = not any(step.get("train/num_skipped_samples") for step in timed)
        if stage in ("logprobs", "policy_training") and peak and trained_all:
            one["peak_share"] = statistics.median(
                _flops(step, stage, model) / step[f"timing/train/{stage}"] / peak for step in timed
            )
        figures[stage] = one
    return figures


def _tokens(step: Record, stage: str) -> float:
    total = step["train/total_num_tokens"]
    if stage == "generation":
        prompt, response = step["train/mean_prompt_length"], step["train/mean_gen_tokens_per_sample"]
        return total * response / (prompt + response)
    num_samples = step.get("train/global_valid_seqs", 0.0)
    skipped = step.get("train/num_skipped_samples", 0.0)
    if stage == "policy_training" and num_samples:
        return total * (num_samples - skipped) / num_samples
    return total


def _flops(step: Record, stage: str, model: ModelInfo) -> float:
    length = step["train/mean_prompt_length"] + step["train/mean_gen_tokens_per_sample"]
    per_token = training_flops_per_token if stage == "policy_training" else forward_flops_per_token
    return step["train/total_num_tokens"] * per_token(model, (length + 1) / 2)


def sync_figures(steps: Sequence[Record]) -> dict[str, float]:
    """Return the medians of the weight syncs; {} where none was made.

    ``seconds`` includes waking the engines; ``load_seconds`` is what the transfer and the load took, and
    ``gb_per_s`` the rate in it, 10^9 bytes per second.
    """
    sent = [step for step in steps if step.get("weight_sync/weight_sync_bytes")]
    if not sent:
        return {}
    loads = [step["weight_sync/weight_sync_load_s"] for step in sent]
    num_bytes = [step["weight_sync/weight_sync_bytes"] for step in sent]
    rates = [size / load / 1e9 for size, load in zip(num_bytes, loads, strict=True)]
    return {
        "bytes": statistics.median(num_bytes),
        "seconds": statistics.median(step["weight_sync/weight_sync_s"] for step in sent),
        "load_seconds": statistics.median(loads),
        "gb_per_s": statistics.median(rates),
    }


def mismatch_figures(steps: Sequence[Record]) -> dict[str, float]:
    """Return the largest values of what compares engine and trainer; NaN where a step has none."""
    names = ("token_mult_prob_error", "max_seq_mult_prob_error", "gen_kl_error")
    return {name: _largest([_number(step.get(f"train/{name}")) for step in steps]) for name in names}


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _largest(values: Sequence[float]) -> float:
    """Return NaN where one value is NaN: no limit must hold for it."""
    return float("nan") if not values or any(value != value for value in values) else max(values)
