"""Sweeps by each of Hydra's launchers and sweepers, of runs that end at once."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import load_sweep
from nemo_like.sweep.job import JobResult, read_results
from tests.unit.config.checkpoints import DEMO, REPOSITORY

PROGRAM = Path(__file__).with_name("start_sweep.py")
SWEPT = ("grpo.seed=1,2,4", "policy.optimizer.lr=3e-4,1e-3")


class Sweep:
    """A sweep that has ended: exit code, output, and the results of its jobs."""

    def __init__(self, exit_code: int, output: str, log_dir: Path) -> None:
        self.exit_code, self.output = exit_code, output
        (self.directory,) = log_dir.iterdir()

    @property
    def results(self) -> list[JobResult]:
        return [job.result for job in read_results(self.directory)]

    @property
    def arguments(self) -> list[list[str]]:
        return [result.arguments for result in self.results]

    def outcomes(self) -> dict[str, str]:
        return {" ".join(result.arguments): result.outcome for result in self.results}


def command(config: Path, log_dir: Path, *arguments: str) -> list[str]:
    # Tests in the background of a shell ignore SIGINT, which the program would inherit.
    start = ["env", "--default-signal=INT", sys.executable, str(PROGRAM), str(config)]
    return [*start, f"logger.log_dir={log_dir}", *arguments]


def start(log_dir: Path, *arguments: str, config: Path = DEMO) -> Sweep:
    done = subprocess.run(
        command(config, log_dir, *arguments),
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    return Sweep(done.returncode, done.stdout, log_dir)


def known_before(done: Sweep, *arguments: str, config: Path = DEMO) -> list[list[str]]:
    """Return the arguments of a sweep's jobs as they are known before any of them runs."""
    return load_sweep(config, [f"logger.log_dir={done.directory.parent}", *arguments]).jobs


@pytest.fixture
def sweep(tmp_path: Path) -> Callable[..., Sweep]:
    return partial(start, tmp_path / "runs")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    """A sweep of two keys; the jobs of seed 2 fail."""
    return start(tmp_path_factory.mktemp("sweep") / "runs", *SWEPT)


def test_every_combination_runs_in_a_directory_of_its_own_and_the_table_has_them(swept: Sweep) -> None:
    assert swept.arguments == known_before(swept, *SWEPT)
    values = [(result.number, result.value, result.steps) for result in swept.results]
    assert values[:2] + values[4:] == [(0, 3e-4, 4), (1, 1e-3, 4), (4, 3e-4, 4), (5, 1e-3, 4)]
    assert sorted(path.name for path in swept.directory.iterdir() if path.is_dir()) == [*"012345"]
    files = sorted(path.name for path in (swept.directory / "0").iterdir())
    assert files == ["job.json", "metrics.jsonl", "report.html"]
    assert f"seed 4 as {swept.directory.name}-4 of {swept.directory.name}" in swept.output
    rows = re.findall(r"│ (\d) +│ ([^│]+?) +│ finished │ 4 +│ ([\d.]+) ", swept.output)
    assert rows == [
        ("0", "grpo.seed=1 policy.optimizer.lr=0.0003", "0.0003"),
        ("1", "grpo.seed=1 policy.optimizer.lr=0.001", "0.0010"),
        ("4", "grpo.seed=4 policy.optimizer.lr=0.0003", "0.0003"),
        ("5", "grpo.seed=4 policy.optimizer.lr=0.001", "0.0010"),
    ]
    assert swept.output.endswith(f"sweep_dir: {swept.directory}\n")


def test_a_job_that_fails_ends_neither_the_others_nor_is_it_forgotten(swept: Sweep) -> None:
    assert swept.exit_code == 1
    outcomes = [result.outcome for result in swept.results]
    assert outcomes == ["finished"] * 2 + ["failed"] * 2 + ["finished"] * 2
    assert re.search(r"│ 2 +│ grpo.seed=2 policy\S+ │ failed +│ 0 +│ - ", swept.output)


@pytest.mark.slow
def test_groups_are_swept_and_mappings_and_lists_are_values(sweep: Callable[..., Sweep]) -> None:
    options = "env.arithmetic.options={a: 1},{b: 2}"
    swept = ["policy=fsdp,default", options, "data.train=[{name: a},{name: b}]"]
    done = sweep(*swept)
    assert done.exit_code == 0, done.output
    assert done.arguments == known_before(done, *swept)
    assert len(done.results) == 4
    first = done.results[0].arguments
    assert first[1:3] == ["policy=fsdp", "~env.arithmetic.options=null"]


@pytest.mark.slow
def test_joblib_runs_jobs_side_by_side_with_a_log_each(sweep: Callable[..., Sweep]) -> None:
    done = sweep("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "grpo.seed=1,2")
    assert done.exit_code == 1
    assert [result.outcome for result in done.results] == ["finished", "failed"]
    assert "seed 1 as" in (done.directory / "0.log").read_text()


@pytest.mark.slow
def test_submitit_runs_jobs(sweep: Callable[..., Sweep]) -> None:
    done = sweep("hydra/launcher=submitit_local", "grpo.seed=1,4")
    assert done.exit_code == 0, done.output
    assert [result.outcome for result in done.results] == ["finished", "finished"]


@pytest.mark.slow
def test_optuna_looks_for_the_best_value_and_goes_on_after_a_job_that_failed(
    sweep: Callable[..., Sweep],
) -> None:
    settings = ("hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=1", "hydra.sweeper.direction=maximize")
    seeds = ("hydra.sweeper.sampler.seed=1", "grpo.seed=choice(1,2)")
    done = sweep("hydra/sweeper=optuna", *settings, *seeds, "policy.optimizer.lr=interval(1e-4,1e-2)")
    assert len(done.results) == 6
    assert {result.outcome for result in done.results} == {"finished", "failed"}
    best = max(result.value for result in done.results if result.value is not None)
    assert f"Best value: {best}" in done.output
    assert f"best_value: {best}" in (done.directory / "optimization_results.yaml").read_text()


def test_a_sweep_in_a_file_and_a_metric_of_ones_own(sweep: Callable[..., Sweep], tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("""
defaults: [grpo_arithmetic_cpu]
checkpointing: {metric_name: train/reward}
hydra: {sweeper: {params: {grpo.seed: "1,4"}}}
""")
    done = sweep(config=path)
    assert done.exit_code == 0, done.output
    assert done.arguments == known_before(done, config=path)
    results = [(result.arguments[0], result.metric, result.value) for result in done.results]
    assert results == [("grpo.seed=1", "train/reward", 0.5), ("grpo.seed=4", "train/reward", 0.5)]


@pytest.mark.parametrize(
    ("to_stop", "seed", "outcome"),
    [(signal.SIGINT, 3, "interrupted"), (signal.SIGTERM, 3, "interrupted"), (signal.SIGINT, 5, "preempted")],
)
def test_an_interrupt_ends_the_job_under_way_and_starts_no_more(
    tmp_path: Path, to_stop: int, seed: int, outcome: str
) -> None:
    log_dir = tmp_path / "runs"
    with subprocess.Popen(
        command(DEMO, log_dir, f"grpo.seed=1,{seed},4"),
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = []
        while not lines or lines[-1] != "waiting\n":
            lines.append(process.stdout.readline())
            assert lines[-1], "".join(lines)
        process.send_signal(to_stop)
        output, _ = process.communicate(timeout=60)
    done = Sweep(process.returncode, output, log_dir)
    assert done.exit_code == 130, output
    assert [result.outcome for result in done.results] == ["finished", outcome]
    assert "2 jobs" in output


def test_a_sweep_of_wrong_values_is_refused_before_any_job(resolved_demo: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_sweep(resolved_demo, ["grpo.seed=1,x", "policy.optimizer.lrs=1,2", "policy=fsdp,fdsp"])
    message = str(caught.value)
    assert "grpo.seed='x' must be an integer" in message
    assert (
        "policy.optimizer.lrs is not a key of the configuration; did you mean policy.optimizer.lr?" in message
    )
    assert "policy=fdsp must be a configuration of the group policy; did you mean fsdp?" in message
    with pytest.raises(ConfigError, match="hydra/launcher"):
        load_sweep(resolved_demo, ["hydra/launcher=nothing", "grpo.seed=1,2"])


def test_a_sweep_ends_with_a_page_that_compares_its_runs(swept: Sweep) -> None:
    page = swept.directory / "report.html"
    assert f"report: {page}" in swept.output.splitlines()
    found = re.search(r'<script type="text/plain" id="head">([^<]*)</script>', page.read_text())
    assert found
    runs = json.loads(gzip.decompress(base64.b64decode(found[1])))["runs"]
    # The jobs of seed 2 wrote no report.
    assert [run["name"] for run in runs] == [
        "0 grpo.seed=1 policy.optimizer.lr=0.0003",
        "1 grpo.seed=1 policy.optimizer.lr=0.001",
        "4 grpo.seed=4 policy.optimizer.lr=0.0003",
        "5 grpo.seed=4 policy.optimizer.lr=0.001",
    ]
    assert [run["curves"]["values"]["validation/accuracy"] for run in runs] == [[3e-4], [1e-3]] * 2


def test_hydras_directory_of_a_sweep_is_kept_where_it_is_set(resolved_demo: Path, tmp_path: Path) -> None:
    assert load_sweep(resolved_demo, ["grpo.seed=1,2", "hydra.sweep.dir=/x/y"]).directory == "/x/y"
    directory = load_sweep(resolved_demo, ["grpo.seed=1,2", f"logger.log_dir={tmp_path}"]).directory
    assert re.fullmatch(rf"{tmp_path}/sweep-\d{{8}}-\d{{6}}", directory)


def test_a_damaged_result_costs_its_job_a_line_of_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = JobResult(number=4, arguments=["a=1"], exit_code=0, metric="m", value=1.0, steps=3, seconds=2.0)
    strange = json.dumps({**asdict(whole), "number": "4"}).encode()
    for number, content in enumerate([b"{", b"[1]", b'{"number": 1}', strange]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "job.json").write_bytes(content)
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "job.json").write_text(json.dumps(asdict(whole)))
    assert read_results(tmp_path) == [(whole, tmp_path / "4")]
    assert f"warning: {tmp_path / '2' / 'job.json'} holds no result of a job" in capsys.readouterr().err
