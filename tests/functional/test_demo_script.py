"""``scripts/demo.sh``, each of the demos, from the checkpoint on to the end of a short run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.runs import ROOT, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.whole_run, pytest.mark.timeout(900)]

SHORT = [
    *("grpo.max_num_steps=1", "grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=4"),
    *("grpo.samples_kept_together=4", "policy.train_global_batch_size=16"),
    *("grpo.val_at_start=false", "grpo.val_at_end=false"),
    *("checkpointing.export_final_hf=false", "logger.wandb.mode=disabled", "logger.run_name=demo"),
]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files of this checkout as those of another, in which everything is set up, and which keeps the
    demos' models for others."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "scripts" / "setup.sh").write_text("true\n")
    for name in ("configs", "nemo_like", "run_grpo.py", ".cache"):
        (root / name).symlink_to(ROOT / name)
    (root / ".venv").symlink_to(sys.prefix)
    return root


@pytest.mark.parametrize("demo", ["", "--experts", "--images", "--distill", "--agent"])
def test_a_demo_makes_its_model_and_trains_it(demo: str, checkout: Path) -> None:
    (ROOT / ".cache").mkdir(exist_ok=True)
    command = ["bash", "scripts/demo.sh", *demo.split(), *SHORT]
    environment = {name: value for name, value in os.environ.items() if name != "VENV"}
    done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["step"] for record in read_metrics(checkout / "runs" / "demo")][-1] == 1
