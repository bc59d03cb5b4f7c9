"""Tables of what a run left."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from nemo_like import RunResult


def lines(path: Path, *objects: dict) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(one) + "\n" for one in objects))


def test_metrics_have_a_row_per_step_and_no_number_where_there_was_none(tmp_path: Path) -> None:
    lines(
        tmp_path / "metrics.jsonl",
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "train/reward": 0.5, "train/loss": None},
    )
    metrics = RunResult(tmp_path).metrics
    assert [*metrics.index] == [0, 1]
    assert metrics["train/reward"].dropna().to_dict() == {1: 0.5}
    assert math.isnan(metrics.loc[1, "train/loss"])


def test_a_run_without_steps_has_an_empty_table(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    assert RunResult(tmp_path).metrics.empty


def test_samples_are_those_of_all_files_with_their_mode(tmp_path: Path) -> None:
    sample = {
        **{"step": 10, "group": 0, "generation": 1, "prompt": "1+1=", "answer": "2", "env": "reward"},
        **{"turns": [{"role": "assistant", "content": "2"}], "rewards": {"reward": 1.0}, "reward": 1.0},
    }
    turns = [
        {"role": "assistant", "content": "a"},
        {"role": "environment", "content": " no "},
        {"role": "assistant", "content": "b"},
    ]
    lines(tmp_path / "rollouts" / "step_10.jsonl", sample)
    lines(tmp_path / "rollouts" / "step_9.jsonl", {**sample, "step": 9, "turns": turns, "reward": None})
    lines(tmp_path / "rollouts" / "validation_10.jsonl", sample)
    samples = RunResult(tmp_path).samples
    assert [*samples["mode"]] == ["training", "training", "validation"]
    assert [*samples["step"]] == [9, 10, 10]
    assert [*samples["response"]] == ["a no b", "2", "2"]
    assert math.isnan(samples["reward"][0])


def test_what_a_run_did_not_keep_is_said(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"rollout\.dump_period=1 keeps"):
        _ = RunResult(tmp_path).samples
    assert RunResult(tmp_path).model_path is None
    (tmp_path / "final_hf").mkdir()
    assert RunResult(str(tmp_path)).model_path == tmp_path / "final_hf"


def test_damaged_lines_of_metrics_are_left_out_and_samples_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "train/reward": 0.5}\n{"st\xff\n{"step": 2}\n')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:2 is no line of metrics"):
        assert [*RunResult(tmp_path).metrics.index] == [1, 2]
    lines(tmp_path / "rollouts" / "step_10.jsonl", {"step": 10})
    with pytest.raises(ValueError, match=r"step_10\.jsonl:1: the sample has no group"):
        _ = RunResult(tmp_path).samples
