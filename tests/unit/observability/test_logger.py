from __future__ import annotations

import io

import pytest

from nemo_like.config.schema import (
    ConsoleMode,
    LoggerConfig,
    MlflowConfig,
    ProfileConfig,
    TensorboardConfig,
    WandbConfig,
    WandbMode,
)
from nemo_like.observability.jsonl import read_metrics
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.summary import RunSummary, SampleAnswer


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(str(tmp_path), "demo")


def logger_config(directory, mode=WandbMode.disabled, tensorboard=False, mlflow=False):
    return LoggerConfig(
        log_dir=str(directory.path.parent),
        run_name="demo",
        console=ConsoleMode.plain,
        num_sample_answers=2,
        wandb=WandbConfig(mode=mode, project="nemo-like-tests", name=None),
        tensorboard=TensorboardConfig(enabled=tensorboard),
        mlflow=MlflowConfig(enabled=mlflow, tracking_uri=None, experiment_name="nemo-like-tests"),
        trace_steps=[],
        profile=ProfileConfig(steps=[], processes=[]),
        nvtx_ranges=False,
    )


def make_logger(directory, stream, mode=WandbMode.disabled, **backends):
    cfg = logger_config(directory, mode, **backends)
    return RunLogger(cfg, directory, resolved_config={}, max_num_steps=2, stream=stream)


def run_two_steps(logger):
    logger.log_validation(0, {"validation/accuracy": 0.25})
    logger.log_step(1, {"train/reward": 0.5})
    logger.log_step(2, {"train/reward": 0.75})
    logger.log_validation(2, {"validation/accuracy": 0.75})


def test_a_run_leaves_metrics_curve_and_wandb_files_and_ends_with_its_path(directory):
    stream = io.StringIO()
    with make_logger(directory, stream, WandbMode.offline) as logger:
        logger.status("starting engines")
        run_two_steps(logger)
        answer = SampleAnswer("21+43=", "640", "640", 1.0)
        logger.finish(RunSummary(outcome="finished", sample_answers=[answer]))
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("starting engines")
    assert "held-out accuracy  0.250 -> 0.750" in lines
    assert "  21+43=  640  right" in lines
    assert lines[-1] == f"run_dir: {directory.path}"
    assert read_metrics(directory.metrics_path) == [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "train/reward": 0.5},
        {"step": 2, "train/reward": 0.75, "validation/accuracy": 0.75},
    ]
    assert directory.learning_curve_path.read_bytes().startswith(b"\x89PNG")
    assert list((directory.path / "wandb").glob("offline-run-*"))
    for name in ("metrics.jsonl", "learning_curve.png", "logs", "wandb"):
        assert any(line.endswith(str(directory.path / name)) for line in lines)


def test_a_run_that_raises_keeps_its_metrics(directory):
    with pytest.raises(RuntimeError, match="an actor died"), make_logger(directory, io.StringIO()) as logger:
        run_two_steps(logger)
        raise RuntimeError("an actor died")
    assert [record["step"] for record in read_metrics(directory.metrics_path)] == [0, 1, 2]


def test_a_run_that_failed_before_its_first_step_can_be_finished(directory):
    stream = io.StringIO()
    with make_logger(directory, stream) as logger:
        logger.finish(RunSummary(outcome="failed: no engine"))
    assert stream.getvalue().splitlines()[-1] == f"run_dir: {directory.path}"
    assert not directory.learning_curve_path.exists()


def test_disagreement_of_trainer_and_engines_is_a_warning_once(directory):
    stream = io.StringIO()
    with make_logger(directory, stream) as logger:
        logger.log_step(1, {"train/token_mult_prob_error": 1.04})
        assert "warning" not in stream.getvalue()
        logger.log_step(2, {"train/token_mult_prob_error": 1.06})
        logger.log_step(3, {"train/token_mult_prob_error": 1.07})
    warnings = [line for line in stream.getvalue().splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "token_mult_prob_error is 1.060 at step 2, over 1.05" in warnings[0]


def test_a_new_run_gets_a_wandb_id_and_a_continued_one_keeps_its_own(directory):
    cfg = logger_config(directory)
    ids = []
    for given in (None, None, "abc12345"):
        with RunLogger(
            cfg, directory, resolved_config={}, max_num_steps=2, wandb_run_id=given, stream=io.StringIO()
        ) as logger:
            ids.append(logger.wandb_run_id)
    assert ids[2] == "abc12345"
    assert len(set(ids)) == 3


def test_every_back_end_that_is_enabled_gets_the_metrics(directory, monkeypatch):
    monkeypatch.setattr("nemo_like.observability.logger._FINISH_S", 60.0)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (directory.path / "mlruns").as_uri())
    stream = io.StringIO()
    with make_logger(directory, stream, tensorboard=True, mlflow=True) as logger:
        run_two_steps(logger)
        logger.finish(RunSummary(outcome="finished"))
    assert "warning" not in stream.getvalue()
    assert f"TensorBoard     {directory.tensorboard_path}" in stream.getvalue()
    (events,) = directory.tensorboard_path.iterdir()
    assert b"train/reward" in events.read_bytes()
    assert list((directory.path / "mlruns").glob("*/*/metrics/train/reward"))
