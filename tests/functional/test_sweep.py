"""Sweeps of real runs, and of short ones as jobs of a real Slurm."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.functional.runs import CONFIG, ROOT
from tests.functional.slurm_fixtures import Slurm, missing, private_slurm

SMALL = [
    *("grpo.max_num_steps=2", "grpo.num_prompts_per_step=16", "grpo.max_val_samples=16"),
    *("policy.data_parallel_size=1", "policy.train_global_batch_size=64", "generation.num_engines=1"),
    *("checkpointing.enabled=false", "logger.wandb.mode=disabled"),
]


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(300)
def test_four_jobs_run_and_end_with_a_table(arithmetic_model: str, tmp_path: Path) -> None:
    swept = ["policy=default,fsdp", f"policy.model_name={arithmetic_model},/nowhere"]
    done = subprocess.run(
        [
            sys.executable,
            "run_grpo.py",
            "--config",
            CONFIG,
            "--multirun",
            *SMALL,
            *swept,
            f"logger.log_dir={tmp_path}",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert done.returncode == 1, done.stdout
    assert done.stdout.count("policy.model_name=/nowhere is not a directory") == 2
    rows = re.findall(r"│ (\d) +│ policy=(\w+) \S+ *│ (\w+) +│ (\d) +│ ([\d.]+|-) +│", done.stdout)
    assert [row[:4] for row in rows] == [
        ("0", "default", "finished", "2"),
        ("1", "default", "refused", "0"),
        ("2", "fsdp", "finished", "2"),
        ("3", "fsdp", "refused", "0"),
    ]
    (sweep,) = tmp_path.iterdir()
    assert f"report: {sweep / 'report.html'}\n" in done.stdout
    assert (sweep / "report.html").stat().st_size > 100_000
    for number in ("0", "2"):
        last = (sweep / number / "metrics.jsonl").read_text().splitlines()[-1]
        value = json.loads((sweep / number / "job.json").read_text())["value"]
        assert json.loads(last)["validation/accuracy"] == value == float(rows[int(number)][4])


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with private_slurm(num_nodes=2) as slurm:
        yield slurm


@pytest.mark.timeout(200)
@pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed: there is no {missing()}")
def test_jobs_are_submitted_to_slurm(slurm: Slurm, tmp_path: Path) -> None:
    launcher = [
        "hydra/launcher=submitit_slurm",
        "hydra.launcher.timeout_min=5",
        "hydra.launcher.cpus_per_task=1",
    ]
    arguments = ["grpo.seed=1,2", f"logger.log_dir={tmp_path}", *launcher]
    command = [
        sys.executable,
        "tests/unit/sweep/start_sweep.py",
        CONFIG,
        *arguments,
        "hydra.launcher.mem_gb=null",
    ]
    done = slurm.run(*command, timeout_s=180, PYTHONPATH=str(ROOT))
    assert done.returncode == 1, done.stdout + done.stderr
    (sweep,) = tmp_path.iterdir()
    results = [json.loads((sweep / number / "job.json").read_text()) for number in ("0", "1")]
    assert [result["exit_code"] for result in results] == [0, 1]
    assert re.search(r"│ 1 +│ grpo.seed=2 │ failed", done.stdout)
