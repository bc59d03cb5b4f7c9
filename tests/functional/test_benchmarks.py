"""Benchmarks run to their end, at sizes at which their figures mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tests.functional.runs import ROOT

SMALL = [
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4", "grpo.samples_kept_together=4"),
    *("policy.train_global_batch_size=16", "grpo.max_val_samples=16", "generation.num_engines=1"),
    "policy.data_parallel_size=1",
]

BESIDE_OTHERS = [
    *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4"),
    *("policy.train_global_batch_size=16", "grpo.max_val_samples=16"),
    *("generation.num_engines=1", "policy.data_parallel_size=1"),
]


def printed(script: str, *arguments: str, timeout_s: float = 280) -> str:
    """Return what a benchmark prints."""
    command = [sys.executable, f"scripts/bench/{script}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def figures(script: str, *arguments: str, timeout_s: float = 280) -> dict[str, Any]:
    """Return the JSON that a benchmark prints."""
    found: dict[str, Any] = json.loads(printed(script, *arguments, timeout_s=timeout_s))
    return found


def test_weights_go_through_every_channel_of_cpus() -> None:
    found = figures("weight_channels.py", "--mib", "2", "--receivers", "1", "--rounds", "1")
    assert found["num_bytes"] == 2 << 20
    assert found["shared_memory_s"] > 0 and found["collective_s"] > 0


@pytest.mark.slow
def test_an_engines_loop_is_timed_beside_vllms_own(arithmetic_model: str, tmp_path: Path) -> None:
    table = tmp_path / "profile.txt"
    sizes = ("--sequences", "16", "--tokens", "4", "--rounds", "1", "--profile", str(table))
    found = figures("engine_loop.py", *sizes, f"policy.model_name={arithmetic_model}")
    assert found["by_sequences"]["16"]["ours_over_bare"] > 0
    assert "request_loop.py" in table.read_text()


@pytest.mark.slow
def test_forests_enter_the_model_with_each_token_once() -> None:
    sizes = ("--rounds", "1", "--groups", "1", "--prompts", "16", "--answer-tokens", "8", "--threads", "1")
    found = figures("forests.py", *sizes)
    assert found.keys() == {"prompt 16", "sessions"}
    for case in found.values():
        assert case["tokens"]["once"] <= case["tokens"]["distinct"] < case["tokens"]["apart"]
        assert case["faster"]["train"] > 0


@pytest.mark.slow
def test_a_policy_scores_and_trains_with_every_kind_of_micro_batch_and_beside_plain_loops() -> None:
    sizes = ("--samples", "8", "--prompt-tokens", "32", "--max-tokens", "64")
    found = figures("policy.py", "--rounds", "1", "--threads", "1", *sizes)
    contestants = {"plain_loop", "plain_loop_sorted", "padded", "sorted", "dynamic", "packed", "shared"}
    for phase in ("logprobs", "train"):
        assert found[phase]["tokens_per_s"].keys() == contestants


@pytest.mark.slow
def test_every_part_of_a_policy_workers_costs_is_measured_on_a_cpu(tmp_path: Path) -> None:
    output = tmp_path / "costs.json"
    sizes = ("--samples", "8", "--tokens", "32", "--rounds", "1", "--output", str(output))
    parts = [json.loads(line) for line in printed("device_costs.py", *sizes).splitlines()]
    assert json.loads(output.read_text()) == {name: found for part in parts for name, found in part.items()}
    assert len(parts) == 8


@pytest.mark.slow
def test_experts_are_loaded_at_once_and_one_by_one_beside_what_a_trainer_spends_on_them() -> None:
    found = figures(
        "expert_loading.py", "--layers", "1", "--experts", "2", "--rounds", "1", "--bucket-mib", "1"
    )
    assert found["expert_tensors"] == 6
    assert found["engine"]["one_by_one_over_stacked"] > 0
    assert found["trainer"]["single_over_fused"] > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_agents_sessions_are_played_on_their_own_engine_and_on_the_other(sums_model: str) -> None:
    found = figures("agents.py", "--model", sums_model, "--sessions", "2", "--calls", "2", "--rounds", "1")
    assert found["own engine"]["cached_share"] > found["other engine"]["cached_share"]


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(300)
def test_steps_are_timed_beside_a_plain_loop(arithmetic_model: str) -> None:
    found = figures("end_to_end.py", "--rounds", "1", "--steps", "2", *SMALL)
    assert found["num_steps_each"] == 1
    assert found["step_s"] > 0 and found["plain_step_s"] > 0


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_every_way_of_this_framework_takes_its_turns_beside_trl_and_bare_libraries(
    arithmetic_model: str, tmp_path: Path
) -> None:
    out, picture = tmp_path / "found.json", tmp_path / "found.png"
    names = ("synchronous", "exact", "ahead", "trl", "trl_vllm", "bare")
    sides = ("--sizes", "demo", "--trl", sysconfig.get_paths()["purelib"], "--sides", *names)
    short = ("--rounds", "1", "--steps", "2", "--out", str(out), "--picture", str(picture))
    found = figures("against_others.py", *sides, *short, *BESIDE_OTHERS, timeout_s=850)
    assert found == json.loads(out.read_text()) and picture.stat().st_size > 0
    assert found["demo"]["sides"].keys() == {*names}
    for side in found["demo"]["sides"].values():
        assert side["step_s"] > 0 and side["new_tokens_per_s"] > 0 and side["peak_mib"] > 100
    assert found["demo"]["time_over_bare"]["ahead"]["median"] > 0
    assert len(found["demo"]["sides"]["synchronous"]["accuracies"]) == 1


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mode", ["modes", "tail", "correction", "journal"])
def test_runs_that_overlap_are_measured(mode: str, arithmetic_model: str, tmp_path: Path) -> None:
    picture = tmp_path / "curves.png"
    sizes = {
        "modes": ("--steps", "5", "--median-s", "0.01", "--modes", "k=1"),
        "tail": ("--seeds", "1", "--median-s", "0.01", "grpo.max_num_steps=5"),
        "correction": (
            *("--staleness", "1", "--median-s", "0.01", "--picture", str(picture)),
            "grpo.max_num_steps=5",
        ),
        "journal": ("--steps", "5"),
    }
    found = figures("overlap.py", mode, *sizes[mode], *SMALL, timeout_s=550)
    if mode == "modes":
        assert found["modes"].keys() == {"synchronous", "k=1"}
    elif mode == "tail":
        assert found["by_seed"].keys() == {"1"}
    elif mode == "correction":
        assert found.keys() == {"k = 1, with correction", "k = 1, without"}
        assert picture.stat().st_size > 0
    else:
        assert found["lines_per_step"] > 0


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_distillation_and_grpo_are_compared(
    arithmetic_model: str, arithmetic_teacher: str, tmp_path: Path
) -> None:
    picture = tmp_path / "curves.png"
    short = ("--picture", str(picture), "grpo.max_num_steps=2")
    found = figures("distillation.py", *short, *SMALL, timeout_s=550)
    assert found["distillation"].keys() == found["GRPO"].keys() == {"first", "last", "steps_to_goal"}
    assert picture.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_a_healthy_run_is_silent_and_the_cost_of_tripwires_is_measured(arithmetic_model: str) -> None:
    silent = printed("tripwires.py", "clean", "--steps", "1", "--only", "moe", timeout_s=280)
    (run,) = map(json.loads, silent.splitlines())
    assert (run["returncode"], run["steps"], run["alarms"]) == (0, 1, [])
    *runs, medians = printed("tripwires.py", "cost", "--steps", "11", "--rounds", "1").splitlines()
    assert [json.loads(run)["level"] for run in runs] == ["off", "cheap"]
    assert json.loads(medians)["median_off"] > 0
