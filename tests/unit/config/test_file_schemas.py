"""The JSON schemas by which editors complete and check configurations, with a real validator."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from omegaconf import OmegaConf

from scripts.write_configs import ROOT, SCHEMAS, schema_line

FILES = sorted(
    path.relative_to(ROOT)
    for pattern in ("configs/*.yaml", "configs/*/*.yaml", "recipes/*.yaml")
    for path in ROOT.glob(pattern)
)


@cache
def validator(name: str) -> Draft7Validator:
    schema = json.loads((ROOT / SCHEMAS / f"{name}.json").read_text())
    Draft7Validator.check_schema(schema)
    return Draft7Validator(schema)


def parsed(text: str) -> Any:
    return OmegaConf.to_container(OmegaConf.create(text), resolve=False)


def wrong(name: str, text: str) -> list[str]:
    """Return where a file of the schema called ``name`` breaks it."""
    return [".".join(map(str, error.absolute_path)) for error in validator(name).iter_errors(parsed(text))]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_a_shipped_file_names_its_schema_and_keeps_to_it(file: Path) -> None:
    text = (ROOT / file).read_text()
    assert text.splitlines()[0] == schema_line(file)
    schema = Path(os.path.normpath(file.parent / text.splitlines()[0].rpartition("=")[2]))
    assert wrong(schema.stem, text) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("configuration", "grpo: {max_num_step: 3}"),
        ("configuration", "grpo: {max_num_steps: three}"),
        ("configuration", "grpo: {max_num_steps: 1.5}"),
        ("configuration", "grpo: {max_num_steps: 0}"),
        ("configuration", "grpo: {max_num_steps: null}"),
        ("configuration", "grpo: {normalize_rewards: 1}"),
        ("configuration", "grpo: {overlap: exactly}"),
        ("configuration", "grpo: [1]"),
        ("configuration", "grpo: {sample_filters: not_truncated}"),
        ("configuration", "grpo: {sample_filters: [{a: 1}]}"),
        ("configuration", "grpo: {adv_estimator: {reward_weights: {correct: heavy}}}"),
        ("configuration", "polcy: {backend: fsdp}"),
        ("configuration", "policy: {backend: deepspeed}"),
        ("configuration", "policy: {lora: {dropout: 1.0}}"),
        ("configuration", "policy: {optimizer: {lr: 0}}"),
        ("configuration", "policy: {megatron_cfg: {tensor_model_parallel_size: -1}}"),
        ("configuration", "generation: {temperature: 3.0}"),
        ("configuration", "generation: {vllm_cfg: {gpu_memory_utilization: 90}}"),
        ("configuration", "data: {train: {kind: csv}}"),
        ("configuration", "data: {train: [{weigth: 1}]}"),
        ("configuration", "data: {train: 3}"),
        ("configuration", "env: {math: {num_actors: many}}"),
        ("configuration", "env: {math: {kind: code, options: {timeout: 3}}}"),
        ("configuration", "env: {math: {kind: code, options: {memory_mib: 0}}}"),
        ("configuration", "cluster: {stage_timeouts_s: {training: 3}}"),
        ("configuration", "cluster: {address: [a]}"),
        ("configuration", "data_plane: {mooncake_cfg: {master_port: 70000}}"),
        ("policy", "model_name: {a: b}"),
        ("policy", "data_parallel_size: true"),
        ("value", "gae_lambda: 1.1"),
        ("env", "kind: maths"),
        ("env", "kind: judge\noptions: {max_tokens: some}"),
    ],
)
def test_a_mistake_is_marked(name: str, text: str) -> None:
    assert wrong(name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("configuration", "grpo: {max_num_steps: '${vars.steps}', seed: '???'}"),
        ("configuration", "policy: ${vars.policy}"),
        ("configuration", "grpo: {sample_filters: ['${vars.own}', not_truncated]}"),
        ("configuration", "grpo: {adv_estimator: {reward_weights: {correct: '${vars.weight}'}}}"),
        ("configuration", "logger: {run_name: 7, wandb: {tags: [1.5]}}"),
        ("configuration", "value: null"),
        ("configuration", "data: {train: [{path: a.jsonl}, {path: b.jsonl}], validation: {path: c.jsonl}}"),
        ("configuration", "env: {math: {kind: function, options: {function: 'a:b', arguments: {x: [1]}}}}"),
        ("configuration", "vars: {anything: [1, {a: b}]}"),
        ("configuration", "defaults: [grpo_cpu, {override policy: fsdp}]\nhydra: {sweeper: {params: {}}}"),
        ("env", "defaults: [default]\nkind: code\noptions: {timeout_s: 3}"),
    ],
)
def test_what_stands_for_a_value_and_what_hydra_takes_are_none(name: str, text: str) -> None:
    assert wrong(name, text) == []


def test_editors_show_a_keys_sentence_default_and_limits() -> None:
    shown = validator("policy").schema["definitions"]["OptimizerConfig"]["properties"]["lr"]
    assert shown["description"] == "the peak of the learning rate"
    assert shown["default"] == 1e-6
    assert {"type": "number", "exclusiveMinimum": 0} in shown["anyOf"]
