from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from nemo_like.algorithms.options import StepShape
from nemo_like.batch.columns import ROLLOUT_COLUMNS, Column, Layout
from nemo_like.batch.recordings import RecordingManifest, read_manifest, recorded_steps
from nemo_like.observability.metrics import maximum, mean
from nemo_like.rollout.flatten import FlatBatch
from nemo_like.rollout.prompts import PromptBatch, RolloutMode
from nemo_like.rollout.recorder import RolloutRecorder, read_rollout
from nemo_like.rollout.rollout_columns import recorded_columns, written_down
from tests.unit.data_plane.fields import frozen

MANIFEST = RecordingManifest(step_shape=StepShape(2, 1))
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
    read = read_rollout(tmp_path, ROLLOUT_COLUMNS, PROMPTS)
    assert read.metrics == METRICS
    assert read.flat.tags == flat_batch().tags
    assert (read.flat.lengths, read.flat.chunk_sizes) == ([2, 3], [1, 1])
    for name, values in flat_batch().columns.items():
        assert read.flat.columns[name].dtype == values.dtype
        assert read.flat.columns[name].tobytes() == values.tobytes()


def test_a_recording_from_before_the_tag_is_judged_says_the_same_by_its_mask(tmp_path: Path) -> None:
    old = replace(flat_batch(), tags={"reward": [0.0, 1.0], "sample_mask": [0, 1]})
    RolloutRecorder(tmp_path, MANIFEST).write(PROMPTS, old, METRICS)
    read = read_rollout(tmp_path, ROLLOUT_COLUMNS, PROMPTS)
    assert read.flat.tags == {"reward": [0.0, 1.0], "is_judged": [False, True]}


def test_refills_of_a_step_have_files_of_their_own(tmp_path: Path) -> None:
    recorder, refill = RolloutRecorder(tmp_path, MANIFEST), replace(PROMPTS, first_group=2)
    recorder.write(PROMPTS, flat_batch(0), METRICS)
    recorder.write(refill, flat_batch(100), METRICS)
    assert read_rollout(tmp_path, ROLLOUT_COLUMNS, PROMPTS).flat.columns["input_ids"][0] == 0
    assert read_rollout(tmp_path, ROLLOUT_COLUMNS, refill).flat.columns["input_ids"][0] == 100
    assert recorded_steps(tmp_path) == {3}


def test_the_manifest_says_how_large_a_rollout_is(tmp_path: Path) -> None:
    RolloutRecorder(tmp_path / "recorded", MANIFEST)
    assert read_manifest(tmp_path / "recorded") == MANIFEST


def test_a_step_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    RolloutRecorder(tmp_path, MANIFEST).write(PROMPTS, flat_batch(), METRICS)
    with pytest.raises(ValueError, match=r"has no step_4-0\.npz: the recorded run made no such rollout"):
        read_rollout(tmp_path, ROLLOUT_COLUMNS, replace(PROMPTS, step=4))


def test_another_number_of_samples_is_refused(tmp_path: Path) -> None:
    RolloutRecorder(tmp_path, MANIFEST).write(PROMPTS, flat_batch(), METRICS)
    with pytest.raises(ValueError, match="holds 2 groups of 1, but this run asks for 2 groups of 4"):
        read_rollout(tmp_path, ROLLOUT_COLUMNS, replace(PROMPTS, num_generations=4))


def test_columns_of_every_layout_come_back(tmp_path: Path) -> None:
    columns = (
        *ROLLOUT_COLUMNS,
        Column("level", "float32", Layout.per_sample, per_prompt=True),
        Column("images", "", Layout.ragged, per_prompt=True),
        Column("scores", "float16", Layout.per_sample, inner_shape=(2,)),
        Column("notes", "", Layout.objects),
        Column("states", "bfloat16", Layout.per_token),
    )
    manifest = replace(MANIFEST, columns=written_down(columns))
    flat = flat_batch()
    flat.columns.update(
        {
            "level": np.array([1.5, -2.0], np.float32),
            "images": [[np.ones((2, 3), np.uint8)], []],
            "scores": np.arange(4, dtype=np.float16).reshape(2, 2),
            "notes": [{"said": "é"}, None],
            "states": torch.arange(5).to(torch.bfloat16),
        }
    )
    RolloutRecorder(tmp_path, manifest).write(PROMPTS, flat, METRICS)
    assert recorded_columns(read_manifest(tmp_path)) == columns
    read = read_rollout(tmp_path, columns, PROMPTS).flat.columns
    assert frozen({**read}) == frozen({column.name: flat.columns[column.name] for column in columns})


def test_a_recording_that_names_no_columns_has_those_of_every_run() -> None:
    assert recorded_columns(MANIFEST) == ROLLOUT_COLUMNS


def test_a_column_that_was_not_recorded_is_named(tmp_path: Path) -> None:
    RolloutRecorder(tmp_path, MANIFEST).write(PROMPTS, flat_batch(), METRICS)
    credit = Column("credit", "float32", Layout.per_token)
    with pytest.raises(ValueError, match=r"step_3-0\.npz has no column 'credit': it was recorded before"):
        read_rollout(tmp_path, (*ROLLOUT_COLUMNS, credit), PROMPTS)


@pytest.mark.parametrize("content", ['{"num_prompts_per_step": 2}', '{"num_steps": 3}', "[]"])
def test_a_manifest_of_another_version_is_refused_as_that(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=r"manifest\.json was written by another version of nemo_like"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1, 2]", b"{}"])
def test_a_damaged_manifest_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"manifest\.json (is damaged|was written by another version)"):
        read_manifest(tmp_path)
