"""Runs that only evaluate: makes their configuration from one for training, and formats their plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches

from nemo_like.config.problems import ConfigError, Problem
from nemo_like.config.secrets import as_written
from nemo_like.configuration import Config
from nemo_like.data.options import source_name
from nemo_like.driver.options import EvaluationConfig, asks_endpoint
from nemo_like.plan.places import gpus_by_node, placement
from nemo_like.plan.plan import process_table
from nemo_like.plan.roles import ray_cpus, roles


def as_evaluation(cfg: Config, sets: Sequence[str] = ()) -> Config:
    """Return a configuration with the group ``evaluation`` as one that only evaluates.

    It answers data.validation, keeps all answers, and neither trains nor reads data.train. ``sets`` names the
    sources to answer; empty means all. Raises ConfigError when a name is no source.
    """
    sources = cfg.data.validation
    names = [source_name(source) for source in sources]
    if unknown := [name for name in sets if name not in names]:
        close = get_close_matches(unknown[0], names, n=1)
        raise ConfigError(
            [
                Problem(
                    key=f"--sets {unknown[0]}",
                    rule=f"is no source of data.validation, which has {', '.join(names) or 'none'}",
                    remedy=f"did you mean {close[0]}?" if close else "",
                )
            ]
        )
    chosen = [source for source, name in zip(sources, names, strict=True) if not sets or name in sets]
    return replace(
        cfg,
        data=replace(cfg.data, train=chosen, validation=chosen),
        grpo=replace(cfg.grpo, max_staleness=0),
        policy=replace(cfg.policy, lora=replace(cfg.policy.lora, enabled=False)),  # exports are merged
        rollout=replace(
            cfg.rollout,
            generate_only=True,
            dump_validation=True,
            dump_period=0,
            record=False,
            replay=None,
        ),
        checkpointing=replace(cfg.checkpointing, enabled=False, export_final_hf=False),
    )


def format_evaluation_plan(cfg: Config, evaluation: EvaluationConfig) -> str:
    """Return what would be evaluated, and by which processes, as text for a terminal."""
    size, limit = cfg.grpo.num_val_generations_per_prompt, cfg.grpo.max_val_samples
    url = as_written(evaluation.base_url or "")
    by_server = f"{evaluation.model} at {url}, tokens counted by {cfg.policy.model_name}"
    names = ", ".join(map(source_name, cfg.data.validation))
    lines = [
        *process_table(roles(cfg), ray_cpus(cfg), sum(gpus_by_node(placement(cfg)).values())),
        "",
        f"answers      by {by_server if asks_endpoint(cfg.evaluation) else cfg.policy.model_name}",
        f"problems     at most {limit:,} of each of {names}, {size} answers to each",
        f"seeds        those of a validation after step {evaluation.step} with grpo.seed={cfg.grpo.seed}",
    ]
    return "\n".join(lines)
