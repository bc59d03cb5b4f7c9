"""A run whose agents are programs of other people's harnesses, each in an environment of its own.

The run itself has the oldest version of ``openai`` that pyproject.toml allows, for harnesses that are
installed beside this project and need an older one.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from nemo_like.observability.software import package_ranges
from tests.functional.own_environments import environment_of, packages_of
from tests.functional.runs import ROOT, FinishedRun, run_grpo

pytestmark = [pytest.mark.slow, pytest.mark.whole_run, pytest.mark.timeout(2400)]

HERE = ROOT / "tests/functional/harness_commands"
HARNESSES = sorted(path.parent.name for path in HERE.glob("*/agent.py"))
# What their users set where the network is the endpoint alone: else they wait for other servers.
VARIABLES = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_AGENTS_DISABLE_TRACING": "1"}
SESSIONS = 3  # of each harness
SMALL = {
    "grpo": {
        "num_prompts_per_step": len(HARNESSES),
        "num_generations_per_prompt": SESSIONS,
        "max_num_steps": 1,
        "val_at_start": False,
        "val_at_end": False,
        "val_period": 0,
        "skip_idle_samples": False,
    },
    "policy": {
        "train_global_batch_size": len(HARNESSES) * SESSIONS,
        "max_total_sequence_length": 2048,  # DSPy explains its format in a thousand characters
        "sequence_packing": {"train_mb_tokens": 8192, "logprob_mb_tokens": 8192},
    },
    "generation": {"max_new_tokens": 64},
    "checkpointing": {"export_final_hf": False},
    "logger": {"wandb": {"mode": "disabled"}},
    "rollout": {"dump_period": 1},
}


def environment(name: str) -> dict[str, Any]:
    """The harness's environment in the run."""
    folder = environment_of(name, HERE / name / "requirements.txt")
    options = {
        "agent": None,
        "command": [str(folder / "bin/python"), str(HERE / name / "agent.py")],
        "variables": VARIABLES,
        "readable_paths": [str(folder), str(HERE / name)],
        "max_calls": 8,
        "timeout_s": 600.0,
    }
    return {"timeout_s": 660.0, "max_concurrency": 4, "options": options}


@pytest.fixture(scope="module")
def run(sums_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """One step on a problem for each harness, with the oldest ``openai``."""
    directory = tmp_path_factory.mktemp("harnesses")
    oldest = packages_of("oldest_openai", f"openai=={oldest_version('openai')}")
    sources = [
        {"name": name, "path": str(ROOT / ".cache/data/sums/train.jsonl"), "env": name} for name in HARNESSES
    ]
    settings = {
        **SMALL,
        "env": {name: environment(name) for name in HARNESSES},
        "data": {"default": {"env": HARNESSES[0]}, "train": sources, "validation": {"env": HARNESSES[0]}},
    }
    (directory / "settings.yaml").write_text(yaml.safe_dump(settings))
    groups = [{f"{ROOT}/configs/env@env.{name}": "agent"} for name in HARNESSES]
    path = directory / "run.yaml"
    path.write_text(
        yaml.safe_dump({"defaults": [str(ROOT / "configs/grpo_agent_cpu.yaml"), *groups, "settings"]})
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{oldest}:{ROOT}")
        run = run_grpo(directory, config=str(path), timeout_s=1500)
    assert run.returncode == 0, run.output
    return run


def oldest_version(package: str) -> str:
    (requirement,) = [one for one in package_ranges() if one.name == package]
    (oldest,) = [one.version for one in requirement.specifier if one.operator == ">="]
    return oldest


def samples(run: FinishedRun, name: str) -> list[dict[str, Any]]:
    """What the run's step dumped of a harness."""
    (dump,) = (run.run_dir / "rollouts").glob("step_*.jsonl")
    lines = [json.loads(line) for line in dump.read_text().splitlines()]
    return [line for line in lines if line["source"] == name]


@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_in_an_environment_of_its_own_plays_and_is_rewarded(run: FinishedRun, name: str) -> None:
    played = samples(run, name)
    assert len(played) == SESSIONS
    assert [one["failure"] for one in played] == [None] * SESSIONS
    assert {one["reward"] for one in played} <= {0.0, 1.0}
    (num_calls,) = run.metrics(f"train/env/{name}/num_calls")
    assert num_calls > 1  # the model was asked again with what its tool returned


@pytest.mark.parametrize("name", [name for name in HARNESSES if name != "dspy"])
def test_a_harness_that_sends_back_what_it_got_continues_one_branch(run: FinishedRun, name: str) -> None:
    assert run.metrics(f"train/env/{name}/num_branches") == [1.0]


def test_every_prompt_of_dspy_is_a_branch_of_its_own(run: FinishedRun) -> None:
    """DSPy writes what was said before into the message that it sends."""
    assert run.metrics("train/env/dspy/num_branches") == run.metrics("train/env/dspy/num_calls")


def test_the_oldest_openai_serves_as_well(run: FinishedRun) -> None:
    assert not re.search("warning: openai", run.output)
    assert run.metrics("train/num_failed_rewards") == [0]
