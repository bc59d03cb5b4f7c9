"""What ``find_mismatch.py`` says of a healthy model, of a run that is over, and of arguments that it cannot
use."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.functional.runs import FEWEST_PROCESSES, FinishedRun, run_grpo, run_script

pytestmark = [pytest.mark.timeout(600), pytest.mark.engine, pytest.mark.whole_run]


def find(*arguments: str, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    return run_script(["scripts/find_mismatch.py", *arguments], timeout_s)


def test_a_healthy_model_gets_its_certificate(arithmetic_model: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = find("--model", arithmetic_model, "--json", str(found))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "nothing differs beyond rounding"
    written = json.loads(found.read_text())
    assert written["holds"] and written["moved"] > 0.01
    rows = {(row["weights"], row["what"]): row["mean_gap"] for row in written["comparisons"]}
    assert len(rows) == 6 and max(rows.values()) < 5e-6
    for layers in written["layers"].values():
        assert layers["agrees"] and (len(layers["excess"]), layers["num_weights"]) == (4 + 2 * 17, 24)


@pytest.fixture(scope="module")
def past(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run of two steps, with a checkpoint of each."""
    kept = ["checkpointing.enabled=true", "checkpointing.save_period=1", "checkpointing.keep_top_k=null"]
    dumped = ["rollout.dump_period=1", "grpo.max_num_steps=2", "grpo.val_period=0"]
    run = run_grpo(tmp_path_factory.mktemp("past"), [*FEWEST_PROCESSES, *kept, *dumped])
    assert run.returncode == 0, run.output
    return run


def test_a_sample_of_a_run_is_compared_with_the_weights_that_sampled_it(past: FinishedRun) -> None:
    done = find(str(past.run_dir), "--sample", "3")
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("sample 3 of step 2, weights of version 1: 38 points of ")
    assert last == "nothing differs beyond rounding"


def test_log_probs_that_these_weights_do_not_give_are_told(past: FinishedRun, tmp_path: Path) -> None:
    """As where a weight did not reach the run's engine, which is another by now."""
    run, found = tmp_path / "run", tmp_path / "found.json"
    shutil.copytree(past.run_dir, run)
    dump = run / "rollouts" / "step_1.jsonl"
    sample, *others = map(json.loads, dump.read_text().splitlines())
    sample["tokens"]["generation_logprobs"] = [
        value and value - 0.01 for value in sample["tokens"]["generation_logprobs"]
    ]
    dump.write_text("".join(json.dumps(one) + "\n" for one in (sample, *others)))
    done = find(str(run), "--step", "1", "--json", str(found))
    assert done.returncode == 1, done.stderr
    sentence = (
        "nothing differs beyond rounding; the log-probs that the run's engine gave do, and no sampling "
        "setting explains them"
    )
    assert done.stdout.splitlines()[-1] == sentence
    written = json.loads(found.read_text())
    assert (written["agrees"], written["sentences"], written["version"]) == (False, [sentence], 0)


@pytest.mark.slow
def test_a_step_or_a_sample_that_the_run_does_not_have_is_refused(past: FinishedRun) -> None:
    done = find(str(past.run_dir), "--step", "9", timeout_s=60)
    assert done.returncode == 2 and "has no samples of it; it has those of steps 1, 2" in done.stderr
    done = find(str(past.run_dir), "--sample", "5000", timeout_s=60)
    assert done.returncode == 2 and "--sample 5000: step 2 has samples 0 to 1023" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "none/such"], "policy.model_name"),
        (["--model", "none/such", "--updates", "-1"], "--updates -1 must be 0 or more"),
        ([], "give either RUN_DIR or --model DIR"),
        (["none/such"], "none/such is no run directory"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(arguments: list[str], said: str) -> None:
    done = find(*arguments, timeout_s=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
