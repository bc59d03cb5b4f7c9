"""The script that makes the tiny checkpoint, run as a user runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.data.arithmetic import ArithmeticDataset
from nemo_like.data.tokenizer import Tokenizer
from scripts.demo_model.warm_start import sampled_accuracy

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "prepare_arithmetic.py"
TEACHER = ("--hidden-size", "192", "--accuracy", "0.97")


def prepare(output, *more, timeout_s=110):
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--output", str(output), "--digits", "2", "--seed", "1", *more],
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


@pytest.fixture(scope="module")
def checkpoint(arithmetic_model):
    return ROOT / arithmetic_model


def test_a_checkpoint_is_made_in_a_new_folder_and_nothing_else_beside_it(tmp_path):
    output = tmp_path / "models" / "nested" / "arithmetic"
    result = prepare(output, "--accuracy", "0.001")  # which takes few steps
    assert result.returncode == 0, result.stderr
    assert "2-digit addition" in result.stdout
    assert len({path.stat().st_mode for path in output.iterdir()}) == 1
    assert list(output.parent.iterdir()) == [output]


def test_the_model_starts_between_a_quarter_and_under_forty_five_per_cent(checkpoint):
    record = json.loads((checkpoint / "warm_start.json").read_text())
    assert 0.25 <= record["accuracy"] < 0.45
    assert (record["digits"], record["seed"]) == (2, 1)
    assert record["steps"] > 0
    assert record["seconds"] > 0


def test_the_saved_model_has_the_accuracy_that_was_recorded(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    held_out = ArithmeticDataset(2, "validation")
    accuracy = sampled_accuracy(model, [held_out[i] for i in range(512)], seed=1)
    recorded = json.loads((checkpoint / "warm_start.json").read_text())["accuracy"]
    assert accuracy == pytest.approx(recorded, abs=0.01)


def test_another_sample_is_about_as_good(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    held_out = ArithmeticDataset(2, "validation")
    accuracy = sampled_accuracy(model, [held_out[i] for i in range(len(held_out))], seed=99)
    assert 0.2 < accuracy < 0.45


def test_the_model_is_small_and_ties_its_embeddings(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert 400_000 < sum(parameter.numel() for parameter in model.parameters()) < 405_000
    assert model.config.tie_word_embeddings
    assert model.config.eos_token_id == Tokenizer(checkpoint).eos_token_id


def test_a_checkpoint_that_is_there_is_kept(checkpoint):
    before = (checkpoint / "model.safetensors").stat().st_mtime_ns
    result = prepare(checkpoint)
    assert result.returncode == 0
    assert "already there" in result.stdout
    assert (checkpoint / "model.safetensors").stat().st_mtime_ns == before


def test_a_checkpoint_of_another_seed_is_refused_and_not_overwritten(checkpoint):
    result = prepare(checkpoint, "--seed", "2")
    assert result.returncode == 1
    assert "was made with --digits 2 --seed 1, not --digits 2 --seed 2" in result.stderr


def test_a_checkpoint_of_another_split_is_refused(checkpoint, tmp_path):
    older = shutil.copytree(checkpoint, tmp_path / "older")
    record = json.loads((older / "warm_start.json").read_text())
    assert record.pop("holds_out_both_orders")
    (older / "warm_start.json").write_text(json.dumps(record))
    result = prepare(older)
    assert result.returncode == 1
    assert "trained on y+x where x+y is held out; remove it" in result.stderr


def test_a_mixture_and_a_dense_model_are_not_taken_for_each_other(checkpoint):
    result = prepare(checkpoint, "--experts", "8")
    assert result.returncode == 1
    assert "was made with --digits 2 --seed 1, not --digits 2 --seed 1 --experts 8" in result.stderr


def test_a_mixture_of_one_expert_is_refused(tmp_path):
    result = prepare(tmp_path / "new", "--experts", "1")
    assert result.returncode == 1
    assert "--experts 1 must be 0 or at least 2; try 8" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_teacher_is_larger_and_nearly_always_right_and_has_the_same_tokenizer(checkpoint, tmp_path):
    teacher = tmp_path / "teacher"
    result = prepare(teacher, *TEACHER, timeout_s=400)
    assert result.returncode == 0, result.stderr
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == 898_112
    held_out = ArithmeticDataset(2, "validation")
    assert sampled_accuracy(model, [held_out[i] for i in range(len(held_out))], seed=99) >= 0.96
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (teacher / name).read_bytes() == (checkpoint / name).read_bytes()


def test_a_student_and_a_teacher_are_not_taken_for_each_other(checkpoint):
    result = prepare(checkpoint, *TEACHER)
    assert result.returncode == 1
    wanted = "not --digits 2 --seed 1 --hidden-size 192 --accuracy 0.97"
    assert f"was made with --digits 2 --seed 1, {wanted}" in result.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--hidden-size", "100"), "--hidden-size 100 must be a multiple of 64; try 128 or 192"),
        (("--hidden-size", "192", "--experts", "8"), "--hidden-size 192 is of dense models"),
        (("--accuracy", "1"), "--accuracy 1 must be above 0 and below 1"),
    ],
)
def test_a_model_that_cannot_be_made_is_refused(tmp_path, options, message):
    result = prepare(tmp_path / "new", *options)
    assert result.returncode == 1
    assert message in result.stderr


def test_a_directory_with_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    result = prepare(tmp_path)
    assert result.returncode == 1
    assert "is no complete checkpoint" in result.stderr
    assert (tmp_path / "notes.txt").read_text() == "mine"
