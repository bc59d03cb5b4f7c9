"""scripts/gpu_check.py: what it reads and how it judges, on made-up results."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from nemo_like.cluster.stage import GPU_STAGES
from nemo_like.config.loader import to_yaml
from nemo_like.configuration import Config, load_config
from nemo_like.environments.interface import Turn
from nemo_like.models.model_arithmetic import forward_flops_per_token, training_flops_per_token
from nemo_like.models.model_info import read_model_info
from nemo_like.observability.trace import Span as RecordedSpan
from nemo_like.observability.trace import chrome_trace
from nemo_like.plan.memory_timetable import GpuMemoryUse, MemoryTimetable
from nemo_like.plan.roles import Role
from nemo_like.policy.options import Device, Precision
from scripts import gpu_check
from scripts.gpu_check_parts import (
    commands,
    conclusions,
    execution,
    figures,
    found,
    judgement,
    memory,
    run_report,
)
from scripts.gpu_check_parts.execution import Done, marked, run
from scripts.gpu_check_parts.outcomes import read_outcomes
from scripts.gpu_check_parts.random_model import SHAPES, write_config
from scripts.gpu_check_parts.rewards import share_of_even_words
from scripts.gpu_check_parts.run_files import Span, driver_spans, read_run
from scripts.gpu_check_parts.sampling import GpuMemory, MemorySample, MemorySampler, open_nvml
from scripts.gpu_check_parts.settings import GIB, ROOT, Gpu, Result, Settings

STEP = {
    "step": 3,
    "timing/train/total_step_time": 9.0,
    "timing/train/weight_sync": 0.5,
    "timing/train/generation": 4.0,
    "timing/train/logprobs": 1.0,
    "timing/train/policy_training": 2.0,
    "train/total_num_tokens": 1000.0,
    "train/mean_prompt_length": 20.0,
    "train/mean_gen_tokens_per_sample": 80.0,
    "train/global_valid_seqs": 10.0,
    "train/loss": 0.1,
    "train/grad_norm": 1.0,
    "train/token_mult_prob_error": 1.01,
    "train/max_seq_mult_prob_error": 1.2,
    "train/gen_kl_error": 0.001,
    "weight_sync/weight_sync_bytes": 4e9,
    "weight_sync/weight_sync_s": 0.5,
    "weight_sync/weight_sync_load_s": 0.25,
}
H100 = Gpu(name="NVIDIA H100 80GB HBM3", total_bytes=80 * GIB, free_bytes=79 * GIB)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(device="cuda", output=tmp_path, gpus=(H100,))


# ---------------------------------------------------------------------- figures


def test_stages_have_seconds_tokens_and_shares_of_peak(tmp_path: Path) -> None:
    write_config(tmp_path, "0.6B")
    model = read_model_info(str(tmp_path), "megatron")
    stages = figures.stage_figures([STEP], model, peak=1e12)
    assert stages["weight_sync"] == {"seconds": 0.5}
    assert stages["generation"] == {"seconds": 4.0, "tokens_per_s": 200.0}  # 800 of responses
    assert stages["logprobs"]["tokens_per_s"] == 1000.0
    assert stages["logprobs"]["peak_share"] == 1000 * forward_flops_per_token(model, 50.5) / 1e12
    assert stages["policy_training"]["peak_share"] == 1000 * training_flops_per_token(model, 50.5) / 2 / 1e12


def test_samples_that_were_left_out_do_not_count_and_leave_no_share_of_peak(tmp_path: Path) -> None:
    write_config(tmp_path, "tiny")
    model = read_model_info(str(tmp_path), "megatron")
    stages = figures.stage_figures([STEP | {"train/num_skipped_samples": 4.0}], model, peak=1e12)
    assert stages["policy_training"] == {"seconds": 2.0, "tokens_per_s": 300.0}


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.5e12),
        (H100.name, 989.5e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA H20", 148e12),
    ],
)
def test_the_peak_is_that_of_the_gpus_name(name: str, peak: float | None) -> None:
    assert figures.peak_flops(name) == peak


def test_a_sync_has_the_rate_of_its_transfer() -> None:
    expected = {"bytes": 4e9, "seconds": 0.5, "load_seconds": 0.25, "gb_per_s": 16.0}
    assert figures.sync_figures([STEP, {"step": 1}]) == expected
    assert figures.sync_figures([{"step": 1}]) == {}


def test_a_missing_comparison_is_not_a_good_one() -> None:
    assert figures.mismatch_figures([STEP])["token_mult_prob_error"] == 1.01
    assert math.isnan(figures.mismatch_figures([STEP, {}])["token_mult_prob_error"])
    assert math.isnan(figures.mismatch_figures([])["token_mult_prob_error"])


def test_the_first_steps_do_not_count_where_there_are_enough() -> None:
    assert figures.warm([{}, {}, {}, {}]) == [{}] * 4
    assert figures.warm([{"step": n} for n in range(1, 6)]) == [{"step": 3}, {"step": 4}, {"step": 5}]


# ---------------------------------------------------------------------- run directories


def test_stages_are_read_from_traces_on_the_systems_clock(tmp_path: Path) -> None:
    driver = [RecordedSpan("generation", "MainThread", 5_000_000, 9_000_000)]
    others = [RecordedSpan("generation", "loop", 1_000_000, 9_500_000)]
    trace = chrome_trace({"driver": driver, "rollout": others})
    (tmp_path / "trace_step_2.json").write_text(json.dumps(trace))
    (tmp_path / "processes.json").write_text('{"engine": 7}')
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "validation/accuracy": 0.3}\n' + json.dumps(STEP))
    files = read_run(tmp_path)
    assert files.stages == driver_spans(trace) == [Span("generation", 5_000_000, 9_000_000)]
    assert files.processes == {7: "engine"}
    assert [step["step"] for step in files.steps] == [3]


def test_a_run_that_left_nothing_is_empty(tmp_path: Path) -> None:
    files = read_run(tmp_path)
    assert not files.records and not files.stages and not files.processes


# ---------------------------------------------------------------------- memory


def timetable(**gib: float) -> MemoryTimetable:
    """Of one GPU: the engine's GiB by stage; the worker has 2 GiB in each."""
    stages = {
        stage: (
            GpuMemoryUse("engine", Role.engine, "weights", int(gib.get(stage.name, 1) * GIB)),
            GpuMemoryUse("policy_worker", Role.policy_worker, "context", 2 * GIB),
        )
        for stage in GPU_STAGES
    }
    return MemoryTimetable({(0, 0): stages})


def sample(time_ns: int, gib: float, **by_process: float) -> MemorySample:
    ids = {"engine": 7, "policy_worker": 8, "stranger": 9}
    held = {ids[name]: int(size * GIB) for name, size in by_process.items()}
    return MemorySample(time_ns, (GpuMemory(int(gib * GIB), held),))


def test_peaks_are_those_of_the_stages_without_what_was_there_before() -> None:
    samples = [
        sample(1, 9, engine=8),  # while the engine started
        sample(12, 25, engine=21, policy_worker=1.5),
        sample(18, 24, engine=20, policy_worker=2, stranger=0.5),
        sample(25, 6, engine=1, policy_worker=3),
    ]
    stages = [Span("generation", 10, 20), Span("logprobs", 22, 30), Span("advantage", 30, 31)]
    processes = {7: "engine", 8: "policy_worker"}
    generation, logprobs, whole = memory.peaks(
        samples, stages, processes, [GIB], timetable(generation=20, engine_start=20)
    )
    assert (generation.stage, generation.measured, generation.planned) == ("generation", 24 * GIB, 22 * GIB)
    assert generation.by_process == {"engine": 21 * GIB, "policy_worker": 2 * GIB, "others": GIB // 2}
    assert generation.planned_by_process == {"engine": 20 * GIB, "policy_worker": 2 * GIB}
    assert (logprobs.stage, logprobs.measured, logprobs.planned) == ("logprobs", 5 * GIB, 3 * GIB)
    assert (whole.stage, whole.measured, whole.planned) == ("the whole run", 24 * GIB, 22 * GIB)
    assert "engine 21.0 / 20.0" in memory.peak_table([generation])[1]


def test_a_sync_may_end_with_engines_awake() -> None:
    (peak, _) = memory.peaks([sample(5, 22)], [Span("weight_sync", 0, 10)], {}, [0], timetable(generation=20))
    assert peak.planned == 22 * GIB


def test_memory_above_the_timetable_is_off_beyond_the_allowance() -> None:
    peak = memory.Peak(gpu=0, stage="logprobs", measured=int(11.9 * GIB), planned=10 * GIB)
    assert judgement.judge_memory([peak]) == []
    peak.measured = int(12.1 * GIB)
    (reason,) = judgement.judge_memory([peak])
    assert reason.startswith("GPU 0 held 12.1 GiB in logprobs, where the timetable has 10.0")


def test_memory_that_is_not_given_back_is_off() -> None:
    assert judgement.judge_end([GIB, GIB], [GIB, GIB + GIB // 8]) == []
    assert judgement.judge_end([GIB, GIB], [GIB, 2 * GIB]) == [
        "GPU 1 holds 1.00 GiB more at the end than at the start"
    ]


def test_the_sampler_samples_until_its_block_ends() -> None:
    with MemorySampler(lambda: (GpuMemory(3, {}),)) as sampler:
        deadline = time.monotonic() + 10
        while not sampler.samples and time.monotonic() < deadline:
            time.sleep(0.01)
    assert sampler.samples[0].gpus == (GpuMemory(3, {}),)
    with MemorySampler(None) as idle:
        assert idle.samples == []


class FakeNvml(ModuleType):
    """One GPU with two processes, of which the driver does not tell the memory of one."""

    class NVMLError(Exception):
        pass

    nvmlInit = staticmethod(lambda: None)
    nvmlDeviceGetCount = staticmethod(lambda: 2)
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)
    nvmlDeviceGetName = staticmethod(lambda handle: b"NVIDIA H200")
    nvmlDeviceGetMemoryInfo = staticmethod(lambda handle: SimpleNamespace(total=80, free=60, used=20))
    nvmlDeviceGetComputeRunningProcesses = staticmethod(
        lambda handle: [
            SimpleNamespace(pid=7, usedGpuMemory=12),
            SimpleNamespace(pid=8, usedGpuMemory=None),
        ]
    )


def test_gpus_are_those_that_cuda_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml("pynvml"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    gpus, read = open_nvml()
    assert gpus == (Gpu(name="NVIDIA H200", total_bytes=80, free_bytes=60),)
    assert read is not None and read() == (GpuMemory(20, {7: 12, 8: 0}),)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert open_nvml() == ((), None)


def test_a_run_on_a_gpu_is_read_judged_and_shown(settings: Settings, tmp_path: Path) -> None:
    write_config(tmp_path / "m", "1.7B")
    run_dir = settings.runs / "model-cuda_ipc-0"
    run_dir.mkdir(parents=True)
    given = [f"policy.model_name={tmp_path / 'm'}", "data.train.path=prompts.jsonl"]
    (run_dir / "config.yaml").write_text(to_yaml(load_config(commands.MODEL_CONFIG, given)))
    (run_dir / "metrics.jsonl").write_text(json.dumps(STEP) + "\n")
    (run_dir / "processes.json").write_text('{"engine": 7, "policy_worker": 8}')
    spans = [RecordedSpan("generation", "t", 10, 20), RecordedSpan("policy_training", "t", 30, 40)]
    (run_dir / "trace_step_1.json").write_text(json.dumps(chrome_trace({"driver": spans})))
    log = tmp_path / "log"
    log.write_text("said\n")
    finished = conclusions.Finished(
        command=commands.Command(
            what="model-cuda_ipc", words=[], deadline_s=9, run_name=run_dir.name, num_steps=1
        ),
        done=Done(command=[], returncode=0, seconds=5.0, log=log, left=[]),
        samples=[sample(15, 26, engine=24, policy_worker=1), sample(35, 70, engine=1, policy_worker=68)],
        before=[GIB],
    )
    result = Result()
    conclusions.conclude(settings, finished, result)
    # Planned are about 51 GiB in training, of which the whole run's are the most.
    assert [reason.partition(", where")[0] for reason in result.reasons] == [
        "model-cuda_ipc: GPU 0 held 69.0 GiB in policy_training",
        "model-cuda_ipc: GPU 0 held 69.0 GiB in the whole run",
    ]
    shown = "\n".join(result.table)
    for part in ("1,720,574,976 parameters", "16.00 GB/s", "GPU 0 generation", "engine 24.0 / ", "1.01000"):
        assert part in shown
    figures_of_run = result.figures["model-cuda_ipc"]
    assert isinstance(figures_of_run, dict)
    assert 0 < figures_of_run["stages"]["policy_training"]["peak_share"] < 1
    assert [peak["stage"] for peak in figures_of_run["memory"]] == [
        "generation",
        "policy_training",
        "the whole run",
    ]
    json.dumps(result.figures)


# ---------------------------------------------------------------------- judgement


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (STEP, None),
        (STEP | {"train/grad_norm": None}, "train/grad_norm is no finite number in steps [3]"),
        (STEP | {"train/grad_norm": 0.0}, "train/grad_norm is 0 in every step: nothing was learned"),
        (STEP | {"train/token_mult_prob_error": 1.06}, "is 1.0600, and the limit 1.05"),
        (STEP | {"train/token_mult_prob_error": None}, "is nan, and the limit 1.05"),
    ],
)
def test_steps_are_judged(step: dict, reason: str | None) -> None:
    reasons = judgement.judge_steps([step], 1, figures.mismatch_figures([step]))
    assert len(reasons) == (reason is not None)
    assert reason is None or reason in reasons[0]


def test_missing_steps_are_off() -> None:
    assert judgement.judge_steps([], 10, figures.mismatch_figures([])) == ["0 of 10 steps were made"]


def test_the_last_accuracy_counts() -> None:
    assert judgement.judge_accuracy([0.3, 0.85]) == []
    assert judgement.judge_accuracy([0.3, 0.9, 0.5]) == [
        "held-out accuracy went from 0.300 to 0.500, and should reach 0.8"
    ]
    assert judgement.judge_accuracy([]) == ["the demo was never validated"]


TESTS = """
import os, signal
import pytest

def test_good(record_property):
    record_property("asleep_gib", 2.5)

def test_bad():
    assert False

@pytest.fixture
def broken():
    raise ValueError("no")

def test_broken(broken):
    pass

def test_left():
    pytest.skip("needs two GPUs")

def test_cut_off():
    os.kill(os.getpid(), signal.SIGKILL)

def test_never_reached():
    pass
"""


def test_tests_that_ended_count_when_the_others_were_cut_off(tmp_path: Path) -> None:
    (tmp_path / "test_them.py").write_text(TESTS)
    outcomes = tmp_path / "outcomes"
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-c", "/dev/null", "-p", "no:randomly"]
    words += ["-p", "scripts.gpu_check_parts.outcomes", f"--outcomes={outcomes}", str(tmp_path)]
    done = run(words, deadline_s=60, log=tmp_path / "log", mark="tests-mark")
    assert done.returncode == -9, (tmp_path / "log").read_text()
    with outcomes.open("a") as file:
        file.write('{"test": "half of a li')
    counts = read_outcomes(outcomes)
    short = {name.rpartition("::")[2]: name for name in [*counts.failed, *counts.skipped, *counts.measured]}
    assert counts.passed == 1
    assert short.keys() == {"test_good", "test_bad", "test_broken", "test_left"}
    assert counts.skipped == {short["test_left"]: "needs two GPUs"}
    assert counts.measured == {short["test_good"]: {"asleep_gib": 2.5}}
    assert judgement.judge_tests(counts) == [
        f"{short['test_bad']} failed: assert False",
        f"{short['test_broken']} failed: ValueError: no",
    ]
    assert "def broken" in outcomes.read_text()  # the traceback
    assert judgement.judge_tests(read_outcomes(tmp_path / "none")) == ["no test ran (0 were skipped)"]


def finished(prints: commands.Prints, log: Path, returncode: int | None) -> conclusions.Finished:
    return conclusions.Finished(
        command=commands.Command(what="offload", words=[], deadline_s=9, prints=prints),
        done=Done(command=[], returncode=returncode, seconds=5.0, log=log, left=[]),
        samples=[],
        before=[],
    )


def test_what_was_measured_before_a_deadline_is_in_the_report(settings: Settings, tmp_path: Path) -> None:
    log = tmp_path / "log"
    lines = [
        "a library's own line",
        '{"optimizer": {"gib": 19.25, "parked": {"to_host_s": [0.5, 0.25], "places": {"a.py:1": 3}}}}',
        '{"reference": {"error": "Traceback\\n  line\\nValueError: no"}}',
        '{"half of',
    ]
    log.write_text("\n".join(lines))
    result = Result()
    conclusions.conclude(settings, finished(commands.Prints.costs, log, None), result)
    late, error = result.reasons
    assert late.startswith("offload was past its deadline") and error == "reference: ValueError: no"
    assert result.figures["offload"]["optimizer"]["gib"] == 19.25  # type: ignore[index]
    assert result.table == [
        "optimizer",
        "  gib 19.25",
        "  parked: to_host_s 0.5 / 0.25",
        "    places: a.py:1 3",
    ]


def test_a_measurement_without_figures_is_off(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("done\n")
    result = Result()
    conclusions.conclude(settings, finished(commands.Prints.costs, tmp_path / "log", 0), result)
    assert result.reasons == [f"offload printed no figures ({tmp_path / 'log'})"]


def test_an_import_that_crashes_is_named() -> None:
    lines = [
        "a library's own line",
        '{"module": "torch", "error": null, "seconds": 1}',
        '{"cuda": {"available": true}}',
        '{"module": "ray", "error": "ImportError: no", "seconds": 1}',
    ]
    assert found.import_problems(lines, ["torch", "ray", "vllm"]) == {
        "ray": "ImportError: no",
        "vllm": "its import ended the process",
    }
    assert found.cuda_facts(lines) == {"available": True}


# ---------------------------------------------------------------------- processes


def test_a_command_past_its_deadline_ends_with_all_that_it_started(tmp_path: Path) -> None:
    script = "setsid sleep 98 & echo said; exec sleep 99"
    log = tmp_path / "log"
    done = run(["bash", "-c", script], deadline_s=2, log=log, mark="test-mark", grace_s=0.5)
    assert done.returncode is None and marked("test-mark") == {}
    late, left = done.reasons("it")
    assert late.startswith("it was past its deadline") and "said" in late
    assert left == "it left 1 processes, which were killed: sleep 98"


def test_a_command_finds_the_project_without_an_installation(tmp_path: Path) -> None:
    code = "import nemo_like, scripts.gpu_check_parts, sys; sys.exit(3)"
    done = run([sys.executable, "-c", code], deadline_s=60, log=tmp_path / "log", mark="other-mark")
    assert (done.returncode, done.left) == (3, [])
    assert done.reasons("it") == [f"it ended with code 3 ({tmp_path / 'log'}):"]


# ---------------------------------------------------------------------- what would run


def run_config(command: commands.Command) -> Config:
    words = list(command.words)
    config = words[words.index("--config") + 1]
    return load_config(ROOT / config, [word for word in words if "=" in word])


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("num_gpus", [1, 2])
def test_every_run_has_a_valid_configuration(tmp_path: Path, device: str, num_gpus: int) -> None:
    asked = Settings(device=device, output=tmp_path, gpus=(H100,) * num_gpus if device == "cuda" else ())
    transports = []
    for part in commands.PARTS:
        for command in part.commands(asked, "1.7B"):
            if command.run_name is None:
                continue
            cfg = run_config(command)
            assert cfg.policy.device is Device[device]
            assert cfg.grpo.max_num_steps == command.num_steps
            assert cfg.logger.run_name == command.run_name
            generation = cfg.generation
            transports.append((generation.weight_transport.value, generation.weight_bucket_mib))
    several = [("cuda_ipc", 64), ("cuda_ipc", 512)]
    expected = {("cuda", 1): several, ("cuda", 2): [*several, ("collective", 512)]}
    assert transports[0][0] == "auto"
    assert transports[1:] == expected.get((device, num_gpus), [("shared_memory", 256)])


def test_what_is_checked_on_a_gpu_has_the_graphs_that_users_runs_have(tmp_path: Path) -> None:
    users = load_config(ROOT / "recipes" / "grpo-qwen3-8b-1n8g.yaml").generation.vllm_cfg.enforce_eager
    asked = Settings(device="cuda", output=tmp_path, gpus=(H100,) * 2)
    run = [one for part in commands.PARTS for one in part.commands(asked, "1.7B") if one.run_name]
    checked = {one.what: run_config(one).generation.vllm_cfg.enforce_eager for one in run}
    assert checked == dict.fromkeys(
        ("demo", "model-cuda_ipc-64", "model-cuda_ipc-512", "model-collective-512"), users
    )
    from tests.gpu.engine_fixtures import bf16_engine_spec  # imports what takes seconds

    engine: Any = bf16_engine_spec(tmp_path, "engine", Device.cuda).kwargs["spec"]
    assert engine.generation.vllm_cfg.enforce_eager is users


@pytest.mark.parametrize("part", commands.PARTS, ids=lambda part: part.name)
def test_every_part_fits_into_eight_minutes_also_when_it_is_ended(part: commands.Part) -> None:
    ending_s = 2 * execution._STOP_S + execution._LEAVE_S + gpu_check._MEMORY_BACK_S
    assert part.budget_s <= commands.PART_LIMIT_S <= 480 - ending_s


def test_a_command_has_what_those_before_it_left_of_its_parts_time(
    monkeypatch: pytest.MonkeyPatch, settings: Settings, tmp_path: Path
) -> None:
    deadlines = []

    def fake_run(words: object, *, deadline_s: float, log: Path, mark: str) -> Done:
        deadlines.append(deadline_s)
        log.write_text("")
        seconds = {1: 200.0, 2: commands.PART_LIMIT_S - 205.0}.get(len(deadlines), 0.0)
        return Done(command=[], returncode=0, seconds=seconds, log=log, left=[])

    def three(settings: Settings, size: str) -> list[commands.Command]:
        return [commands.Command(what=f"run-{number}", words=[], deadline_s=300) for number in range(3)]

    monkeypatch.setattr(gpu_check, "run", fake_run)
    part = commands.Part(name="model", what="", budget_s=1, needs=(), commands=three)
    result = Result()
    asked = Settings(device="cpu", output=tmp_path)
    assert [command.what for command in gpu_check._run_part(part, asked, None, result)] == [
        *("run-0", "run-1", "run-2")
    ]
    assert deadlines == [300, commands.PART_LIMIT_S - 200]
    assert result.reasons == [f"run-2 did not run: the part's {commands.PART_LIMIT_S} s were over"]


def test_what_starts_no_engine_comes_first() -> None:
    starts = ["vllm" in part.needs for part in commands.PARTS]
    assert starts == sorted(starts)
    last = ["engines", "drafts", "demo", "model"]
    assert [part.name for part in commands.PARTS if "vllm" in part.needs] == last


def test_the_demo_on_a_gpu_gives_memory_up_and_corrects_for_the_mismatch() -> None:
    cfg = load_config(ROOT / "configs" / "grpo_arithmetic_gpu.yaml")
    assert cfg.policy.precision is Precision.bfloat16
    assert cfg.policy.offload_optimizer_for_logprob and cfg.policy.offload_parameters_between_phases
    assert cfg.loss_fn.use_importance_sampling_correction
    assert not cfg.loss_fn.use_generation_logprobs_as_prev
    assert cfg.grpo.max_num_steps == 80


@pytest.mark.parametrize(("free_gib", "size"), [(79, "1.7B"), (35, "0.6B"), (8, None), (None, "1.7B")])
def test_the_model_is_the_largest_that_fits(tmp_path: Path, free_gib: int | None, size: str | None) -> None:
    gpus = () if free_gib is None else (Gpu(name="", total_bytes=80 * GIB, free_bytes=free_gib * GIB),)
    asked = Settings(device="cuda", output=tmp_path, gpus=gpus)
    assert run_report.fitting_size(asked, ("1.7B", "0.6B")) == size


def test_the_models_have_their_sizes(tmp_path: Path) -> None:
    for size, billions in (("1.7B", 1.72), ("0.6B", 0.60)):
        write_config(tmp_path, size)
        info = read_model_info(str(tmp_path), "megatron")
        assert info.num_parameters == pytest.approx(billions * 1e9, rel=0.01)
    assert SHAPES["tiny"]["vocab_size"] == 512


def test_rewards_differ_with_the_words() -> None:
    def reward(response: str) -> float:
        return share_of_even_words(Turn(prompt="", response=response, answer="", is_truncated=True))

    assert reward("w12 w13 <eos> w4 w7") == 0.4
    assert reward("") == 0.0


def test_a_dry_run_says_what_is_missing_and_what_would_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_check, "open_nvml", lambda: ((), None))
    monkeypatch.setattr(gpu_check, "_sees_gpus", lambda settings: False)
    assert gpu_check.main(["--dry-run", f"--output={tmp_path / 'out'}"]) == 0
    shown = capsys.readouterr().out
    for part in commands.PARTS:
        assert f"{part.name}: {part.what}" in shown
    assert shown.count("cannot run here: there is no NVIDIA GPU") == len(commands.PARTS) - 1
    assert "configs/grpo_arithmetic_gpu.yaml" in shown
    assert not (tmp_path / "out").exists()


def test_missing_pytest_is_said_with_the_set_up_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "is_there", lambda module: module != "pytest")
    assert gpu_check.main(["--dry-run", "--parts=kernels", f"--output={tmp_path / 'out'}"]) == 0
    remedy = "cannot run here: pytest is missing (bash scripts/setup.sh --dev installs it)"
    assert remedy in capsys.readouterr().out


def test_a_part_that_cannot_be_read_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_part(part: commands.Part, settings: Settings, read: object, result: Result) -> Iterator[None]:
        if part.name == "transports":
            raise KeyError("bytes")
        result.table.append(f"{part.name} ran")
        yield

    monkeypatch.setattr(gpu_check, "_run_part", run_part)
    assert gpu_check.main(["--device=cpu", "--parts=transports,demo", f"--output={tmp_path}"]) == 1
    assert "demo ran" in capsys.readouterr().out
    (reason,) = json.loads((tmp_path / "report.json").read_text())["reasons"]
    assert reason.startswith("transports: what it left cannot be read:") and "KeyError: 'bytes'" in reason


INTERRUPTED = """
import sys
from pathlib import Path
from scripts import gpu_check
from scripts.gpu_check_parts.commands import Command, Part, Prints

def measuring(settings, size):
    words = ["bash", "-c", f"cat {settings.output}/line; exec sleep 97"]
    return [Command(what="it", words=words, deadline_s=60, prints=Prints.costs)]

output = Path(sys.argv[1])
(output / "line").write_text('{"first": {"seconds": 1.5}}\\n')
gpu_check.PARTS = [
    Part(name=name, what="", budget_s=1, needs=(), commands=measuring) for name in ("head", "demo")
]
sys.exit(gpu_check.main(["--device=cpu", f"--output={output}"]))
"""


def test_a_check_that_is_interrupted_ends_what_it_started_and_leaves_its_report(tmp_path: Path) -> None:
    """Whoever ends a call asks with SIGTERM first."""
    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED, str(tmp_path)], cwd=ROOT)
    log, deadline = tmp_path / "it.log", time.monotonic() + 60
    while not (log.is_file() and log.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["parts"].keys() == {"head", "end"}
    assert report["parts"]["head"]["figures"] == {"it": {"first": {"seconds": 1.5}}}
    first, last = report["reasons"]
    assert first.startswith("head: it was interrupted after")
    assert last == "head: the check was interrupted: nothing after this ran"


def test_a_report_shows_every_reason_once_more_at_its_end(tmp_path: Path) -> None:
    results = {
        "demo": Result(seconds=60, table=["a table"], reasons=["it failed:\n    a log"]),
        "end": Result(),
    }
    assert conclusions.part_lines("demo", results["demo"])[1] == "== demo: off, 60 s"
    assert conclusions.summary_lines(tmp_path, results)[-2:] == [
        "1 things are off:",
        "  - demo: it failed:",
    ]
