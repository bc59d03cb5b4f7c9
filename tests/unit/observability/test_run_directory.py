from __future__ import annotations

from pathlib import Path

from nemo_like.observability.run_directory import RunDirectory


def test_a_run_directory_has_a_place_for_everything(tmp_path):
    directory = RunDirectory.create(str(tmp_path / "runs"), "first")
    assert directory.path == tmp_path / "runs" / "first"
    assert directory.name == "first"
    assert directory.logs_path.is_dir()
    assert directory.metrics_path.parent == directory.path
    assert directory.learning_curve_path.parent == directory.path


def test_a_name_that_is_taken_gets_a_number(tmp_path):
    names = [RunDirectory.create(str(tmp_path), "demo").name for _ in range(3)]
    assert names == ["demo", "demo-2", "demo-3"]


def test_the_path_is_absolute_also_from_a_relative_log_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert RunDirectory.create("runs", "demo").path == tmp_path / "runs" / "demo"


def test_an_actor_name_with_a_slash_is_one_file_in_logs(tmp_path):
    directory = RunDirectory.create(str(tmp_path), "demo")
    assert directory.log_path("policy/0") == str(directory.logs_path / "policy-0.log")
    assert Path(directory.log_path("policy/0")).parent == directory.logs_path


def test_the_resolved_config_is_kept_as_given(tmp_path):
    directory = RunDirectory.create(str(tmp_path), "demo")
    directory.write_config("grpo:\n  seed: 1\n")
    assert directory.config_path.read_text() == "grpo:\n  seed: 1\n"


def test_every_output_that_there_is_is_listed_by_what_it_is(tmp_path):
    directory = RunDirectory.create(str(tmp_path), "demo")
    assert directory.outputs() == {"logs": directory.logs_path}
    for name in ("rollouts", "recorded", "profiles", "checkpoints", "final_hf"):
        (directory.path / name).mkdir()
    for name in ("metrics.jsonl", "config.yaml", "trace_step_3.json", "trace_step_12.json"):
        (directory.path / name).touch()
    assert set(directory.outputs()) == {
        *("metrics", "configuration", "checkpoints", "trained model", "rollouts as text"),
        *("recorded rollouts", "profiles", "logs", "trace of step 3", "trace of step 12"),
    }
    assert directory.outputs()["trace of step 3"] == directory.trace_path(3)
