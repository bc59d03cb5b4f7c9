from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_like.config.recordings import RecordingManifest, read_manifest, recorded_steps
from nemo_like.observability.metrics import maximum, mean
from nemo_like.rollout.flatten import FlatBatch
from nemo_like.rollout.prompts import PromptBatch, RolloutMode
from nemo_like.rollout.recorder import RolloutRecorder, read_rollout

MANIFEST = RecordingManifest(num_prompts_per_step=2, num_generations_per_prompt=1)
PROMPTS = PromptBatch(mode=RolloutMode.training, step=3, policy_version=2, indices=(7, 9), num_generations=1)
METRICS = {"reward": mean(3.0, 4.0), "longest": maximum(9.0)}


def flat_batch(first_token: int = 0) -> FlatBatch:
    return FlatBatch(
        columns={
            "input_ids": np.arange(first_token, first_token + 5, dtype=np.int32),
            "response_mask": np.array([0, 1, 0, 0, 1], np.uint8),
            "generation_logprobs": np.array([0, -0.1, 0, 0, -1e-30], np.float32),
        },
        lengths=[2, 3],
        chunk_sizes=[1, 1],
        tags={"reward": [0.1, 1.0], "outcome": ["x", "y"], "is_truncated": [True, False]},
    )


def test_a_rollout_comes_back_exactly(tmp_path: Path) -> None:
    RolloutRecorder(tmp_path, MANIFEST).write(PROMPTS, flat_batch(), METRICS)
    read = read_rollout(tmp_path, PROMPTS)
    assert read.metrics == METRICS
    assert read.flat.tags == flat_batch().tags
    assert (read.flat.lengths, read.flat.chunk_sizes) == ([2, 3], [1, 1])
    for name, values in flat_batch().columns.items():
        assert read.flat.columns[name].dtype == values.dtype
        assert read.flat.columns[name].tobytes() == values.tobytes()


def test_refills_of_a_step_have_files_of_their_own(tmp_path: Path) -> None:
    recorder, refill = RolloutRecorder(tmp_path, MANIFEST), replace(PROMPTS, first_group=2)
    recorder.write(PROMPTS, flat_batch(0), METRICS)
    recorder.write(refill, flat_batch(100), METRICS)
    assert read_rollout(tmp_path, PROMPTS).flat.columns["input_ids"][0] == 0
    assert read_rollout(tmp_path, refill).flat.columns["input_ids"][0] == 100
    assert recorded_steps(tmp_path) == {3}


def test_the_manifest_says_how_large_a_rollout_is(tmp_path: Path) -> None:
    RolloutRecorder(tmp_path / "recorded", MANIFEST)
    assert read_manifest(tmp_path / "recorded") == MANIFEST


def test_a_step_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    RolloutRecorder(tmp_path, MANIFEST).write(PROMPTS, flat_batch(), METRICS)
    with pytest.raises(ValueError, match=r"has no step_4-0\.npz: the recorded run made no such rollout"):
        read_rollout(tmp_path, replace(PROMPTS, step=4))


def test_another_number_of_samples_is_refused(tmp_path: Path) -> None:
    RolloutRecorder(tmp_path, MANIFEST).write(PROMPTS, flat_batch(), METRICS)
    with pytest.raises(ValueError, match="holds 2 groups of 1, but this run asks for 2 groups of 4"):
        read_rollout(tmp_path, replace(PROMPTS, num_generations=4))


def test_a_column_that_is_no_numeric_array_cannot_be_recorded(tmp_path: Path) -> None:
    flat = flat_batch()
    flat.columns["images"] = [np.zeros(3), np.zeros(5)]  # type: ignore[assignment]
    with pytest.raises(ValueError, match="column 'images' is not a numeric array"):
        RolloutRecorder(tmp_path, MANIFEST).write(PROMPTS, flat, METRICS)
