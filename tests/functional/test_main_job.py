"""The demo as a user runs it: real Ray, TransferQueue, vLLM and Megatron-core on the tiny model."""

from __future__ import annotations

import gzip
import json
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from nemo_like.configuration import load_config
from nemo_like.data.datasets import build_dataset
from nemo_like.observability.jsonl import without_measurements
from nemo_like.observability.metric_meanings import meaning_of
from nemo_like.plan.reported_metrics import training_metrics, validation_metrics
from tests.functional.conftest import CHAT_TEMPLATE
from tests.functional.mooncake_storage import in_mooncake
from tests.functional.runs import (
    CONFIG,
    DEMO_STEPS,
    ROOT,
    FinishedRun,
    copied_run,
    kill_all,
    run_grpo,
    running,
    wait_for_step,
    wait_until_gone,
)
from tests.functional.test_watch import watch

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_run]

NUM_STEPS = DEMO_STEPS
FEW_STEPS = 4
FEW = [f"grpo.max_num_steps={FEW_STEPS}", "grpo.val_at_start=false", "grpo.val_at_end=false"]


def test_the_policy_learns(demo: FinishedRun) -> None:
    rewards = demo.metrics("train/reward")
    assert len(rewards) == NUM_STEPS
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.12
    accuracies = demo.metrics("validation/accuracy")
    assert accuracies[0] < 0.45
    assert accuracies[-1] > accuracies[0] + 0.12


def test_trainer_and_engine_agree_on_every_step(demo: FinishedRun) -> None:
    errors = demo.metrics("train/token_mult_prob_error")
    assert len(errors) == NUM_STEPS
    assert max(errors) < 1.00002


def test_every_step_samples_from_the_weights_of_the_step_before(demo: FinishedRun) -> None:
    assert demo.metrics("train/policy_version") == [float(version) for version in range(NUM_STEPS)]


def test_the_run_directory_is_complete(demo: FinishedRun) -> None:
    names = {path.name for path in demo.run_dir.iterdir()}
    assert {"config.yaml", "metrics.jsonl", "learning_curve.png", "logs", "wandb", "final_hf"} <= names
    assert list((demo.run_dir / "wandb").glob("offline-run-*/*.wandb"))
    # The weights can be read by whoever reads their configuration.
    assert len({path.stat().st_mode for path in (demo.run_dir / "final_hf").iterdir()}) == 1
    assert {path.stem for path in (demo.run_dir / "logs").iterdir()} >= {
        "engine-0",
        "engine-1",
        "policy_worker-0",
        "rollout",
    }
    with Image.open(demo.run_dir / "learning_curve.png") as picture:
        assert min(picture.size) > 300


def test_every_tenth_step_leaves_an_excerpt_of_its_samples(demo: FinishedRun) -> None:
    cfg = load_config(demo.run_dir / "config.yaml")
    names = {path.stem for path in (demo.run_dir / "rollouts").glob("step_*.jsonl")}
    assert names == {f"step_{step}" for step in range(10, NUM_STEPS + 1, 10)}
    for name in names:
        lines = (demo.run_dir / "rollouts" / f"{name}.jsonl").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        assert len(samples) == cfg.rollout.excerpt_samples
        assert {sample["excerpt_of"] for sample in samples} == {cfg.grpo.num_samples_per_step}


def test_the_terminal_shows_the_run_and_nothing_of_the_libraries(demo: FinishedRun) -> None:
    lines = demo.output.rstrip().splitlines()
    assert lines[-1] == f"run_dir: {demo.run_dir}"
    assert sum(line.startswith("step ") for line in lines) == NUM_STEPS + 2
    assert sum("] waiting for " not in line for line in lines) < NUM_STEPS + 40  # a busy machine waits longer
    for noise in ("Traceback", "WARNING", "warning:", "UserWarning", "INFO"):
        assert noise not in demo.output


def test_every_metric_has_a_name_that_a_checkpoint_may_be_judged_by(demo: FinishedRun) -> None:
    cfg = load_config(demo.run_dir / "config.yaml")
    known = [*validation_metrics(cfg), *training_metrics(cfg)]
    assert "train/env/arithmetic/" in known
    reported = {name for record in demo.records() for name in record if not name.startswith("train/env/")}
    assert {name for name in reported if name.startswith(("train/", "validation/"))} <= {*known}


def test_no_process_and_no_temporary_file_is_left(demo: FinishedRun) -> None:
    assert demo.processes_left() == []
    assert demo.temporary_files == []


def test_every_step_says_what_its_data_plane_moved(demo: FinishedRun) -> None:
    for record in demo.records():
        if "train/loss" not in record:
            continue
        tokens = record["train/total_num_tokens"]
        assert record["data_plane/put/count"] == 1
        assert record["data_plane/put/input_ids/bytes"] == 4 * tokens
        # Groups of two workers may share a storage key, which each of them then reads whole.
        assert tokens <= record["data_plane/fetch/response_mask/bytes"] <= 2 * tokens
        # Training reads what its worker wrote itself.
        assert record["data_plane/write/prev_logprobs/bytes"] == 4 * tokens
        assert "data_plane/fetch/prev_logprobs/bytes" not in record
        assert record["data_plane/open/count"] == 1
        assert 0 < record["data_plane/put/latency_p50_s"] <= record["data_plane/put/latency_max_s"] < 10


def test_what_the_data_plane_moved_is_shown_as_a_table(demo: FinishedRun) -> None:
    command = [sys.executable, "scripts/data_plane_table.py", str(demo.run_dir)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60).stdout
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines()]
    rows = [tuple(row[:3]) for row in cells if row]
    assert ("put", "", str(NUM_STEPS)) in rows
    assert ("", "prev_logprobs", str(2 * NUM_STEPS)) in rows  # two workers


def test_a_run_that_has_ended_is_shown_with_what_it_reached(demo: FinishedRun) -> None:
    watcher = watch(str(demo.run_dir))
    shown, _ = watcher.communicate(timeout=60)
    assert watcher.returncode == 0
    assert f"The run finished. {len(demo.metrics('train/loss'))} of " in shown
    for line in ("held-out accuracy", "training reward"):
        assert next(one for one in demo.output.splitlines() if one.startswith(line)) in shown


def test_every_metric_of_a_run_is_explained(demo: FinishedRun) -> None:
    names = {name for record in demo.records() for name in record} - {"step"}
    assert len(names) > 100
    assert sorted(name for name in names if meaning_of(name) is None) == []


@pytest.fixture(scope="module")
def spans(demo: FinishedRun) -> dict[str, list[dict[str, Any]]]:
    """Drawn events of the traced step by process."""
    events = json.loads((demo.run_dir / "trace_step_2.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    by_process = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_process[names[event["pid"]]].append(event)
    return by_process


def named(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(start, end) in microseconds."""
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == name]


def test_the_trace_has_every_process_and_what_it_did(spans: dict[str, list[dict[str, Any]]]) -> None:
    does = {process: {event["name"] for event in events} for process, events in spans.items()}
    assert does["driver"] >= {
        "total_step_time", "weight_sync", "generation", "logprobs", "policy_training",
    }  # fmt: skip
    assert does["rollout"] >= {"begin", "next_part", "generation", "flatten", "put"}
    for engine in ("engine-0", "engine-1"):
        assert does[engine] >= {"generate", "fetch_weights", "load_weights"}
    assert does["environment"] >= {"step"}
    assert does["policy_worker-0"] >= {"fetch", "compute", "write", "send", "train", "push_weights"}
    assert does["policy_worker-1"] >= {"fetch", "compute", "write", "train"}
    assert "send" not in does["policy_worker-1"]


def test_the_processes_share_a_time_line(spans: dict[str, list[dict[str, Any]]]) -> None:
    # Then the step asks whether further groups come; without dynamic sampling there are none.
    (generation_start, generation_end), _ = named(spans["driver"], "generation")
    for engine in ("engine-0", "engine-1"):
        for start, end in named(spans[engine], "generate"):
            assert generation_start <= start <= end <= generation_end
    ((training_start, training_end),) = named(spans["driver"], "policy_training")
    for worker in ("policy_worker-0", "policy_worker-1"):
        ((start, end),) = named(spans[worker], "train")
        assert training_start <= start <= end <= training_end


def test_only_the_steps_and_processes_that_were_asked_for_are_written(demo: FinishedRun) -> None:
    assert [path.name for path in demo.run_dir.glob("trace_step_*")] == ["trace_step_2.json"]
    profiles = [str(path.relative_to(demo.run_dir)) for path in demo.run_dir.glob("profiles/*/*")]
    assert profiles == ["profiles/step_2/policy_worker-1.json.gz"]


def test_the_profile_has_the_operators_of_the_backward_pass(demo: FinishedRun) -> None:
    with gzip.open(demo.run_dir / "profiles/step_2/policy_worker-1.json.gz", "rt") as file:
        names = {str(event.get("name")) for event in json.load(file)["traceEvents"]}
    assert "compute" in names
    assert "aten::mm" in names
    assert any("Backward" in name for name in names)


def test_tensorboard_has_every_step(demo: FinishedRun) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (demo.run_dir / "tensorboard").iterdir()
    rewards = {
        event.step: value.tensor.float_val[0]
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == "train/reward"
    }
    assert rewards == pytest.approx(
        {r["step"]: r["train/reward"] for r in demo.records() if "train/reward" in r}
    )


def test_a_checkpoint_becomes_the_model_that_the_run_exported(demo: FinishedRun, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "scripts/convert_checkpoint.py",
        str(demo.run_dir),
        "--output",
        str(tmp_path / "hf"),
    ]
    converting = subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True, text=True)
    assert f"step {NUM_STEPS} of {demo.run_dir.name} is in" in converting.stdout
    exported = load_file(demo.run_dir / "final_hf" / "model.safetensors")
    converted = load_file(tmp_path / "hf" / "model.safetensors")
    assert converted.keys() == exported.keys()
    for name, tensor in exported.items():
        np.testing.assert_array_equal(converted[name], tensor)
    for model in (demo.run_dir / "final_hf", tmp_path / "hf"):
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        assert tokenizer.chat_template == (ROOT / CHAT_TEMPLATE).read_text()
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert again.returncode == 2
    assert "exists already" in again.stderr


# What is killed, and when: each kind of actor and of TransferQueue's processes, and at last all at once. The
# first step starts from weights which the engines have already, since a validation came before it.
REPLACED = {
    "rollout": "generation@1",
    "engine-1": "weight_sync@2",
    "environment": "generation@3",
    "ray::SimpleStorageUnit": "logprobs@3",
    "data_plane": "generation@4",
    "ray::TransferQueueController": "train@4",
}
STARTED_AGAIN = {"policy_worker-1": "train@5"}
# They live, and raise.
REPLACED_AFTER_ERROR = {"out-of-memory/engine-0": "generation@6"}
STARTED_AGAIN_AFTER_ERROR = {"out-of-memory/policy_worker-0": "train@7"}
ALL_AT_ONCE = {"all": "logprobs@8"}
KILLS = {**REPLACED, **STARTED_AGAIN, **REPLACED_AFTER_ERROR, **STARTED_AGAIN_AFTER_ERROR, **ALL_AT_ONCE}
# Each of its steps is saved, and the last one is that in which all processes are killed.
KILLED = [
    *("grpo.max_num_steps=8", "grpo.val_at_end=false", "checkpointing.save_period=1"),
    *("checkpointing.keep_top_k=null", "checkpointing.export_final_hf=false", "cluster.max_restarts=5"),
]


@pytest.mark.timeout(900)
def test_a_run_whose_processes_are_killed_one_by_one_and_all_at_once_has_the_metrics_of_an_undisturbed_one(
    demo: FinishedRun, tmp_path: Path
) -> None:
    """The others: the driver and an engine's own worker are in ``test_watch``, Mooncake's master is in
    ``test_data_plane_faults``, Ray's processes are in ``test_private_ray``. An engine and a policy worker
    that live and raise count as dead too. At last the same command meets a corrupt checkpoint."""
    plan = ",".join(f"{victim}:{moment}" for victim, moment in KILLS.items())
    program = ["-m", "tests.functional.killing_run", plan]
    with running(tmp_path, KILLED, program=program) as (process, mark, run_dir):
        output, _ = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, output
    check_what_was_told(output, run_dir)
    assert wait_until_gone(mark) == []
    last = max(int(path.name.removeprefix("step_")) for path in (run_dir / "checkpoints").glob("step_*"))
    damage(run_dir / "checkpoints" / f"step_{last}" / "policy" / "__0_0.distcp")
    resumed = run_grpo(tmp_path, KILLED, name=mark)
    assert resumed.returncode == 0, resumed.output
    assert f"step_{last} is corrupt: policy/__0_0.distcp is not what was written" in resumed.output
    assert f"continuing after step {last - 1}" in resumed.output
    state = json.loads((run_dir / "checkpoints" / "step_8" / "training_state.json").read_text())
    assert all(source["digest"] for sources in state["data"].values() for source in sources)
    assert "of which data it is" not in resumed.output
    assert "cannot be compared with those before" not in resumed.output
    assert (run_dir / "checkpoints" / f"step_{last}.corrupt").is_dir()
    undisturbed = [without_measurements(record) for record in demo.records() if record["step"] <= 8]
    assert [without_measurements(record) for record in resumed.records()] == undisturbed
    # Both parts of it are one run of W&B.
    recorded = [path.name for path in (resumed.run_dir / "wandb").glob("offline-run-*/run-*.wandb")]
    assert len(recorded) == 2
    assert len(set(recorded)) == 1


def check_what_was_told(output: str, run_dir: Path) -> None:
    """Check what the run said of those that died and of those that found no memory."""
    assert f"(recovery {len(REPLACED)} of 10)" in output, output
    assert f"(restart {len(STARTED_AGAIN) + len(STARTED_AGAIN_AFTER_ERROR)} of 5)" in output, output
    assert (
        "warning: actor 'engine-0' failed during stage 'generation': OutOfMemoryError: CUDA out of memory. "
        f"Tried to allocate 2.00 GiB. The rest follows.; its log is {run_dir}/logs/engine-0.log\n"
        "replacing what died and doing step 6 again (recovery 1 of 10)\n"
    ) in output, output
    assert "actor 'policy_worker-0' failed during stage 'policy.train': OutOfMemoryError: " in output, output
    assert "Traceback" not in output, output
    assert "in _step" in (run_dir / "logs" / "engine-0.log").read_text()


@pytest.mark.slow
def test_other_storage_changes_no_metric(demo: FinishedRun, tmp_path: Path) -> None:
    """The demo's storage is simple."""
    run = run_grpo(tmp_path, [*FEW, "grpo.val_at_start=true", in_mooncake()])
    assert run.returncode == 0, run.output
    first = [without_measurements(record) for record in demo.records() if record["step"] <= FEW_STEPS]
    assert [without_measurements(record) for record in run.records()] == first


def damage(file: Path) -> None:
    """33 flipped bytes in the middle; the size stays."""
    contents = bytearray(file.read_bytes())
    middle = len(contents) // 2
    contents[middle : middle + 33] = bytes(byte ^ 0xFF for byte in contents[middle : middle + 33])
    file.write_bytes(contents)


@pytest.mark.slow
def test_a_run_killed_at_three_random_moments_ends_as_one_never_interrupted(
    demo: FinishedRun, tmp_path: Path
) -> None:
    command = [*FEW, "grpo.val_at_start=true", "grpo.max_num_steps=12", "checkpointing.save_period=1"]
    moments, mark = random.Random(7), None
    for step in sorted(moments.sample(range(1, 11), 3)):
        with running(tmp_path, command, mark) as (process, mark, run_dir):
            wait_for_step(process, run_dir, step)
            time.sleep(moments.uniform(0, 1.0))
            kill_all(mark)
            process.communicate(timeout=30)
    resumed = run_grpo(tmp_path, command, name=mark)
    assert resumed.returncode == 0, resumed.output
    first = [without_measurements(record) for record in demo.records() if record["step"] <= 12]
    assert [without_measurements(record) for record in resumed.records()] == first


@pytest.mark.slow
def test_a_run_asked_to_stop_saves_and_continues_even_under_another_layout(
    demo: FinishedRun, tmp_path: Path
) -> None:
    command = [*FEW, "grpo.val_at_start=true", "grpo.max_num_steps=6", "generation.num_engines=1"]
    with running(tmp_path, command) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=1)
        process.send_signal(signal.SIGUSR1)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 75
    assert "received SIGUSR1" in output
    assert wait_until_gone(mark) == []
    layout = ["policy.data_parallel_size=1", "policy.megatron_cfg.tensor_model_parallel_size=2"]
    resumed = run_grpo(tmp_path, [*command, *layout], name=mark)
    assert resumed.returncode == 0, resumed.output
    for key in ("train/loss", "train/grad_norm", "train/reward"):
        assert resumed.metrics(key)[:4] == pytest.approx(demo.metrics(key)[:4], abs=1e-3)
    again = run_grpo(tmp_path, command, name=mark)
    assert again.returncode == 0
    assert "had finished already" in again.output


@pytest.mark.slow
def test_as_many_other_problems_are_refused_when_a_run_continues(demo: FinishedRun, tmp_path: Path) -> None:
    copy = copied_run(demo, tmp_path)
    problems = build_dataset(load_config(ROOT / CONFIG, []).data.train[0], "train")
    rows = [{"prompt": one.prompt, "answer": one.answer[::-1]} for one in problems]
    (tmp_path / "other.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = [f"data.train={{path: {tmp_path / 'other.jsonl'}, kind: jsonl}}"]
    refused = run_grpo(tmp_path, [f"grpo.max_num_steps={DEMO_STEPS + 1}", *other], name=copy.name)
    assert refused.returncode == 1
    told = " ".join(refused.output.split())
    assert f"other has {len(rows)} problems as before, but others" in told
    assert "begin a new run from its model" in told


@pytest.mark.slow
def test_a_run_that_was_killed_while_it_exported_exports_when_it_is_started_again(
    demo: FinishedRun, tmp_path: Path
) -> None:
    copy = copied_run(demo, tmp_path)
    exported = copy / "final_hf"
    weights = (exported / "model.safetensors").read_bytes()
    exported.rename(exported.with_name("tmp_final_hf"))
    command = [f"grpo.max_num_steps={DEMO_STEPS}"]
    again = run_grpo(tmp_path, command, name=copy.name)
    assert again.returncode == 0, again.output
    assert "The run finished." in again.output
    assert (exported / "model.safetensors").read_bytes() == weights
    assert not list(again.run_dir.glob("tmp_*"))
    assert again.records() == demo.records()
    assert "had finished already" in run_grpo(tmp_path, command, name=copy.name).output
