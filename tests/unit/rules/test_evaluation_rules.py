"""Runs that only evaluate: what they take of a configuration, and which checkpoint is meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like.api.evaluated_checkpoint import EvaluatedCheckpoint, evaluated_checkpoint
from nemo_like.config.loader import to_yaml
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.plan.evaluation_plan import as_evaluation, format_evaluation_plan
from nemo_like.plan.machine_rules import Machine
from nemo_like.plan.roles import Role, roles
from nemo_like.rules.rules import validate
from tests.unit.config.checkpoints import REPOSITORY

SERVER = ("evaluation.base_url=http://host:8000/v1", "evaluation.model=m")


def evaluation(checkpoint: Path, *overrides: str, sets: tuple[str, ...] = ()) -> Config:
    there = ["+evaluation=default", f"policy.model_name={checkpoint}", *overrides]
    return as_evaluation(load_config(REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml", there), sets)


def problems(cfg: Config, machine: Machine = Machine.another) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(cfg, machine)
    return [str(problem) for problem in caught.value.problems]


def test_an_evaluation_trains_nothing_and_reads_its_own_data_alone(checkpoint: Path, tmp_path: Path) -> None:
    cfg = evaluation(
        checkpoint,
        f"data.train={{kind: jsonl, path: {tmp_path / 'nowhere.jsonl'}}}",
        "checkpointing.enabled=true",
        "rollout.record=true",
    )
    validate(cfg, Machine.another)
    needs = roles(cfg)
    assert (needs[Role.policy_worker].count, needs[Role.engine].count) == (0, 2)
    assert Role.endpoint not in needs
    assert cfg.data.train == cfg.data.validation
    assert (cfg.checkpointing.enabled, cfg.rollout.record, cfg.rollout.dump_validation) == (
        False,
        False,
        True,
    )
    path = tmp_path / "again.yaml"
    path.write_text(to_yaml(cfg))
    assert load_config(path, []) == cfg


def test_a_server_takes_the_place_of_engines(checkpoint: Path) -> None:
    cfg = evaluation(checkpoint, *SERVER, "evaluation.step=7")
    validate(cfg, Machine.another)
    assert (roles(cfg)[Role.engine].count, roles(cfg)[Role.endpoint].count) == (0, 1)
    assert cfg.evaluation is not None
    plan = format_evaluation_plan(cfg, cfg.evaluation)
    assert "client of a server             1" in plan
    assert "answers      by m at http://host:8000/v1, tokens counted by" in plan
    assert "seeds        those of a validation after step 7 with grpo.seed=1" in plan


def test_sets_are_chosen_by_name(checkpoint: Path) -> None:
    both = "data.validation=[{name: one}, {name: two}]"
    assert [one.name for one in evaluation(checkpoint, both, sets=("two",)).data.validation] == ["two"]
    with pytest.raises(ConfigError, match=r"--sets tow is no source of data\.validation, which has one"):
        evaluation(checkpoint, both, sets=("tow",))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["evaluation.step=-1"], "evaluation.step=-1 must be at least 0"),
        (["evaluation.model=m"], "evaluation.model=m says nothing without evaluation.base_url"),
        ([SERVER[0]], "evaluation.base_url=http://host:8000/v1 says nothing without evaluation.model"),
        (
            [SERVER[1], "evaluation.base_url=host:8000"],
            "evaluation.base_url=host:8000 must start with http:// or https://",
        ),
        (
            [SERVER[1], "evaluation.base_url=http://host/v1/completions"],
            "evaluation.base_url=http://host/v1/completions is the address of one method; name the API",
        ),
        (["evaluation.max_parallel=0"], "evaluation.max_parallel=0 must be at least 1"),
        (["evaluation.max_attempts=0"], "evaluation.max_attempts=0 must be at least 1"),
        (["evaluation.request_timeout_s=0"], "evaluation.request_timeout_s=0.0 must be above 0 and finite"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(checkpoint: Path, overrides: list[str], said: str) -> None:
    (problem,) = problems(evaluation(checkpoint, *overrides))
    assert said in problem


def test_a_training_run_cannot_have_the_group(checkpoint: Path) -> None:
    there = ["+evaluation=default", f"policy.model_name={checkpoint}"]
    (problem,) = problems(load_config(REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml", there))
    assert "evaluation is of runs that only evaluate" in problem
    assert "scripts/evaluate.py" in problem


def test_a_key_that_this_machine_lacks_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KEY_OF_NOBODY", raising=False)
    cfg = evaluation(checkpoint, *SERVER, "evaluation.api_key_variable=KEY_OF_NOBODY")
    assert any(
        "api_key_variable=KEY_OF_NOBODY is no environment variable" in one
        for one in problems(cfg, Machine.this)
    )
    validate(cfg, Machine.another)


def made(run: Path, *, exported: int | None, saved: tuple[int, ...] = ()) -> Path:
    run.mkdir()
    (run / "config.yaml").write_text("checkpointing: {checkpoint_dir: null}\n")
    if exported is not None:
        (run / "final_hf").mkdir()
        (run / "final_hf" / "config.json").write_text("{}")
        (run / "final_hf" / "run.json").write_text(json.dumps({"step": exported}))
    for step in saved:
        (run / "checkpoints" / f"step_{step}").mkdir(parents=True)
    return run


def test_a_run_means_its_latest_policy(tmp_path: Path) -> None:
    whole = made(tmp_path / "whole", exported=8, saved=(4, 8))
    assert evaluated_checkpoint(whole) == EvaluatedCheckpoint(whole / "final_hf", 8)
    cut = made(tmp_path / "cut", exported=8, saved=(8, 12))
    saved = cut / "checkpoints" / "step_12"
    assert evaluated_checkpoint(cut) == EvaluatedCheckpoint(cut / "hf_step_12", 12, saved)
    assert evaluated_checkpoint(cut / "checkpoints" / "step_8") == EvaluatedCheckpoint(
        cut / "hf_step_8", 8, cut / "checkpoints" / "step_8"
    )
    (cut / "hf_step_12").mkdir()
    (cut / "hf_step_12" / "config.json").write_text("{}")
    assert evaluated_checkpoint(cut).source is None  # it was converted before


def test_a_hugging_face_directory_has_step_0_unless_it_names_one(tmp_path: Path) -> None:
    run = made(tmp_path / "run", exported=8)
    assert evaluated_checkpoint(run / "final_hf").step == 8
    (run / "final_hf" / "run.json").unlink()
    assert evaluated_checkpoint(run / "final_hf").step == 0


def test_a_name_on_the_hub_is_left_to_what_downloads_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    name = Path("Qwen/Qwen3-8B")
    assert evaluated_checkpoint(name) == EvaluatedCheckpoint(name, 0)


def test_what_is_no_checkpoint_says_what_would_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is neither a Hugging Face checkpoint .*; it is no directory"):
        evaluated_checkpoint(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"the run left neither final_hf nor a checkpoint; it needs"):
        evaluated_checkpoint(made(tmp_path / "bare", exported=None))
    saved = made(tmp_path / "saved", exported=None, saved=(30, 4)) / "checkpoints"
    with pytest.raises(ValueError, match=r"step_40 is no directory; .*checkpoints has step_4, step_30$"):
        evaluated_checkpoint(saved / "step_40")
    with pytest.raises(ValueError, match=r"step_40 is no directory; .*nowhere has no step_N$"):
        evaluated_checkpoint(tmp_path / "nowhere" / "step_40")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: [", b"[]", b"checkpointing: 5"])
def test_a_run_whose_configuration_is_damaged_is_refused_with_its_name(
    tmp_path: Path, content: bytes
) -> None:
    run = made(tmp_path / "run", exported=8)
    (run / "config.yaml").write_bytes(content)
    with pytest.raises(ValueError, match=r"run/config\.yaml is not the configuration of a run"):
        evaluated_checkpoint(run)
