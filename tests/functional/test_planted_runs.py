"""Mutations planted in runs of the real thing are caught, each by a tripwire that is about it, and the alarms
say where engines and trainer differ as docs/explanation/mutations.md does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_like.mismatch.search import NOTHING
from tests.tripwires.mutations import MUTATIONS
from tests.tripwires.planted import ROOT

pytestmark = [pytest.mark.timeout(1200), pytest.mark.whole_run]

# From several groups: the mutation, a tripwire that must be among those that say something, and the step by
# which the run must have ended. Ranks whose samples have equally many tokens are normalised alike.
FEW = {
    "weights_one_version_behind": ("weights_digest", 2),
    "reward_of_another_sample": ("rewards", 1),
    "normalised_by_rank": ("denominators", 3),
    "kl_without_gradient": ("loss", 1),
    "schedule_one_update_late": ("learning_rate", 1),
}
QUICK = ("normalised_by_rank",)
_PAGE = (ROOT / "docs" / "explanation" / "mutations.md").read_text(encoding="utf-8")
# What the search for the module says of a mutation, or how that begins.
SENTENCES = {
    name: said.replace("nothing", NOTHING)
    for name, said in re.findall(r"^\| `(\w+)` \| `([^`]+)`", _PAGE, re.MULTILINE)
}


def outcome(name: str, directory: Path, *overrides: str) -> dict[str, Any]:
    """What the script says of one mutation."""
    results = directory / "results.jsonl"
    command = [sys.executable, "scripts/bench/mutation_score.py", "--caught-only", "--only", name]
    command += ["--overrides", *overrides] if overrides else []
    subprocess.run(
        [*command, "--results", str(results)], cwd=ROOT, check=True, timeout=1000, stdout=subprocess.DEVNULL
    )
    (line,) = results.read_text().splitlines()
    found: dict[str, Any] = json.loads(line)
    assert found["num_processes"] > 0
    assert found["where"].startswith(SENTENCES.get(name, ""))
    return found


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FEW]
)
def test_a_mutation_ends_the_run_at_the_first_step_that_it_spoils(
    arithmetic_model: str, tmp_path: Path, name: str
) -> None:
    found = outcome(name, tmp_path, "data_plane.backend=in_memory", "generation.num_engines=1")
    tripwire, latest = FEW[name]
    assert found["returncode"] == 1
    ((step, tripwires),) = found["caught"].items()
    assert int(step) <= latest
    assert tripwire in tripwires


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MUTATIONS if name not in FEW])
def test_every_mutation_is_caught(arithmetic_model: str, tmp_path: Path, name: str) -> None:
    found = outcome(name, tmp_path)
    assert found["caught"]
    assert all(int(step) <= 3 for step in found["caught"])
