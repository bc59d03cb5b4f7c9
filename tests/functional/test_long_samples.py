"""Long samples take memory in proportion to their length."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.functional.runs import ROOT

# One matrix of a number for each pair of 8,192 tokens would double what a further token takes at the end.
MOST_GROWTH = {"logprobs": 1.4, "train": 1.1}


def test_a_further_token_takes_no_more_memory_in_a_longer_sample() -> None:
    command = [sys.executable, "scripts/bench/long_samples.py", "--lengths", "2048,4096,8192"]
    command += ["--vocabularies", "64", "--kinds", "megatron,fsdp"]
    run = subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.PIPE, text=True)
    (kinds,) = json.loads(run.stdout).values()
    assert set(kinds) == {"megatron", "fsdp"}
    for kind, phases in kinds.items():
        for phase, found in phases.items():
            assert found["growth"] < MOST_GROWTH[phase], (kind, phase, found)
