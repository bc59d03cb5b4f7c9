"""Runs that only evaluate: what they have of a configuration for training, and rules on the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
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
from nemo_like.rules.machine_rules import Machine


def as_evaluation(cfg: Config, sets: Sequence[str] = ()) -> Config:
    """Return a configuration with the group ``evaluation`` as one that evaluates: it answers data.validation,
    keeps all answers, and neither trains nor reads data.train.

    ``sets`` names the sources to answer; none: all. Raises ConfigError when there is none of a name.
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


def evaluation_problems(cfg: Config, machine: Machine) -> Iterator[Problem]:
    """Yield every problem for which the run could not evaluate as its group ``evaluation`` says."""
    asked = cfg.evaluation
    if asked is None:
        return
    if not cfg.rollout.generate_only or cfg.rollout.replay is not None:
        yield Problem(
            key="evaluation",
            rule="is of runs that only evaluate (rollout.generate_only=true, without rollout.replay)",
            remedy="start it with scripts/evaluate.py, or leave the group out",
        )
    if not cfg.data.validation:
        yield Problem(
            key="data.validation",
            rule="has no source, and an evaluation answers its problems",
            remedy="name one, for example data.validation={kind: jsonl, path: test.jsonl}",
        )
    if asked.step < 0:
        yield Problem(key=f"evaluation.step={asked.step}", rule="must be at least 0", remedy="")
    yield from _server(asked)
    if asks_endpoint(cfg.evaluation) and machine is Machine.this and cfg.cluster.address is None:
        yield from _key(asked)


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


def _server(asked: EvaluationConfig) -> Iterator[Problem]:
    if (asked.base_url is None) != (asked.model is None):
        given, lacking = ("base_url", "model") if asked.model is None else ("model", "base_url")
        yield Problem(
            key=f"evaluation.{given}={getattr(asked, given)}",
            rule=f"says nothing without evaluation.{lacking}",
            remedy="give --endpoint URL and --model NAME, or neither",
        )
    if asked.base_url is not None:
        key = f"evaluation.base_url={asked.base_url}"
        if not asked.base_url.startswith(("http://", "https://")):
            yield Problem(key=key, rule="must start with http:// or https://", remedy="")
        if asked.base_url.rstrip("/").endswith("/completions"):
            remedy = "name the API's root, which usually ends in /v1"
            yield Problem(key=key, rule="is the address of one method", remedy=remedy)
    for name in ("max_parallel", "max_attempts"):
        if (count := getattr(asked, name)) < 1:
            yield Problem(key=f"evaluation.{name}={count}", rule="must be at least 1", remedy="")
    if not 0 < asked.request_timeout_s < float("inf"):
        yield Problem(
            key=f"evaluation.request_timeout_s={asked.request_timeout_s:g}",
            rule="must be above 0 and finite",
            remedy="",
        )


def _key(asked: EvaluationConfig) -> Iterator[Problem]:
    variable = asked.api_key_variable
    if variable is not None and not os.environ.get(variable):
        yield Problem(
            key=f"evaluation.api_key_variable={variable}",
            rule="is no environment variable, or an empty one",
            remedy=f"export {variable} before, or null for a server that asks for no key",
        )
