"""Checkpoints that bring code, and libraries, are loaded before a run as its processes will load them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.models.remote_code import allowing_code
from nemo_like.plan.machine_rules import Machine
from nemo_like.preflight.checks import preflight
from nemo_like.preflight.loadable_models import loading_problems, models_with_code
from scripts.demo_model.tiny_tokenizer import save_tokenizer

Demo = Callable[..., Config]


def say(line: str) -> None:
    """Keep it from the terminal."""


def with_code(checkpoint: Path, model_type: str, code: str = "") -> None:
    """Have the checkpoint name code for a model of this type."""
    file = checkpoint / "config.json"
    named = {"model_type": model_type, "auto_map": {"AutoConfig": "own_code.OwnConfig"}}
    file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
    (checkpoint / "own_code.py").write_text(code)
    save_tokenizer(checkpoint)


def told(cfg: Config) -> list[str]:
    with allowing_code(cfg.policy):
        return [str(problem) for problem in loading_problems(cfg)]


def test_only_checkpoints_that_bring_code_are_loaded(demo: Demo, checkpoint: Path) -> None:
    assert models_with_code(demo()) == {}
    with_code(checkpoint, "qwen3")
    assert list(models_with_code(demo("value=default", "grpo.adv_estimator.name=gae"))) == [
        "policy.model_name",
        "value.model_name",
    ]


def test_a_model_that_needs_code_is_refused_before_anything_starts_unless_it_is_trusted(
    demo: Demo, checkpoint: Path
) -> None:
    with_code(checkpoint, "unheard_of")
    with pytest.raises(ConfigError) as raised:
        preflight(demo("policy=fsdp"), Machine.this, say)
    assert [str(problem) for problem in raised.value.problems] == [
        f"policy.model_name={checkpoint} needs Python code of its own (auto_map), and "
        "policy.trust_remote_code=false runs none; read its Python files, and set "
        "policy.trust_remote_code=true if you trust them"
    ]


def test_a_model_that_transformers_knows_needs_no_code_that_it_brings(demo: Demo, checkpoint: Path) -> None:
    with_code(checkpoint, "qwen3", "raise RuntimeError('this ran')")
    assert told(demo("policy=fsdp")) == []


def test_code_that_fails_is_told_with_its_error(demo: Demo, checkpoint: Path) -> None:
    with_code(checkpoint, "unheard_of", "raise RuntimeError('this ran')")
    (problem,) = told(demo("policy=fsdp", "policy.trust_remote_code=true"))
    assert problem == (
        f"policy.model_name={checkpoint} brings Python code that cannot be loaded: RuntimeError: this ran"
    )


def test_a_library_that_cannot_be_found_is_refused_by_name(demo: Demo) -> None:
    (problem,) = told(demo("policy.external_lib=[json, no_such_library]"))
    assert problem == (
        "policy.external_lib=[json, no_such_library] cannot be imported: ModuleNotFoundError: No module "
        "named 'no_such_library'; install its modules, put them beside the configuration, or on PYTHONPATH"
    )
    assert told(demo("policy.external_lib=[json]")) == []
