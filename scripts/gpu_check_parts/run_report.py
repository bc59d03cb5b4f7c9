"""Puts the figures of one whole run together, from its files and what was sampled beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_like.configuration import load_config
from nemo_like.models.model_info import read_model_info
from nemo_like.plan.memory_timetable import memory_problems, memory_timetable
from nemo_like.plan.run_models import run_models
from nemo_like.policy.groups.layout import policy_world_size
from scripts.gpu_check_parts.commands import BUCKETS_MIB, MODEL_CONFIG, model_directory
from scripts.gpu_check_parts.figures import peak_flops, stage_figures, sync_figures, warm
from scripts.gpu_check_parts.memory import Peak, peaks
from scripts.gpu_check_parts.random_model import write_config
from scripts.gpu_check_parts.run_files import RunFiles
from scripts.gpu_check_parts.sampling import MemorySample
from scripts.gpu_check_parts.settings import Settings


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What a run took and held."""

    figures: dict[str, Any]
    peaks: list[Peak]


def measured_run(
    settings: Settings,
    run_dir: Path,
    files: RunFiles,
    samples: Sequence[MemorySample],
    before: Sequence[int],
) -> MeasuredRun:
    """Return the figures of a run that made steps; the model that it trained must still be there."""
    cfg = load_config(run_dir / "config.yaml")
    model = read_model_info(cfg.policy.model_name, cfg.policy.backend)
    found: list[Peak] = []
    peak = None
    if settings.gpus:
        timetable = memory_timetable(cfg, run_models(cfg), settings.gpus[0].total_bytes)
        found = peaks(samples, files.stages, files.processes, before, timetable)
        peak = peak_flops(settings.gpus[0].name)
    num_workers = policy_world_size(cfg.policy)
    steps = warm(files.steps)
    figures = {
        "num_parameters": model.num_parameters,
        "stages": stage_figures(steps, model, peak and peak * num_workers),
        "weight_sync": sync_figures(steps),
        "memory": [asdict(one) for one in found],
    }
    return MeasuredRun(figures, found)


def stage_table(what: str, figures: Mapping[str, Any]) -> list[str]:
    """Return lines that show the figures of a run."""
    title = f"{what}, {figures['num_parameters']:,} parameters"
    lines = [f"{title:<36}{'seconds':>10}{'tokens/s':>12}{'of peak':>10}"]
    for stage, one in figures["stages"].items():
        rate = f"{one['tokens_per_s']:,.0f}" if "tokens_per_s" in one else "-"
        share = f"{one['peak_share']:.1%}" if "peak_share" in one else "-"
        lines.append(f"  {stage:<34}{one['seconds']:>10.3f}{rate:>12}{share:>10}")
    sync = figures["weight_sync"]
    if sync:
        lines.append(
            f"  of a weight sync {sync['load_seconds']:.3f} s are the transfer of "
            f"{sync['bytes'] / 1e9:.3f} GB and the load, {sync['gb_per_s']:.2f} GB/s"
        )
    if "accuracies" in figures:
        shown = " ".join(f"{value:.3f}" for value in figures["accuracies"])
        lines.append(f"  held-out accuracy {shown}")
    worst = ", ".join(f"{name} {value:.5f}" for name, value in figures["mismatch"].items())
    return [*lines, f"  engine and trainer, largest of all steps: {worst}"]


def fitting_size(settings: Settings, sizes: Sequence[str]) -> str | None:
    """Return the first of these sizes whose run fits the first GPU's free memory, by the timetable.

    Return the first one where no GPU is known, and None where none fits.
    """
    for size in sizes:
        model = model_directory(settings) / "model"
        write_config(model, size)
        given = [f"policy.model_name={model}", "data.train.path=prompts.jsonl"]
        cfg = load_config(MODEL_CONFIG, [*given, f"generation.weight_bucket_mib={max(BUCKETS_MIB)}"])
        if not settings.gpus or not any(memory_problems(cfg, run_models(cfg), settings.gpus[0].free_bytes)):
            return size
    return None
