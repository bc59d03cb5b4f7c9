from __future__ import annotations

import io
import json
import re
import shlex

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_like.observability.events import Event
from nemo_like.observability.jsonl import read_metrics
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.logger_kinds.mlflow import MlflowConfig
from nemo_like.observability.logger_kinds.prometheus import PrometheusConfig
from nemo_like.observability.logger_kinds.tensorboard import TensorboardConfig
from nemo_like.observability.logger_kinds.wandb import WandbConfig, WandbMode
from nemo_like.observability.options import ConsoleMode, LoggerConfig, ProfileConfig
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.summary import RunSummary, SampleAnswer
from nemo_like_tools.report.report_recorder import ReportRecorder


@pytest.fixture
def directory(tmp_path):
    return RunDirectory.create(str(tmp_path), "demo")


def logger_config(directory, mode=WandbMode.disabled, tensorboard=False, mlflow=False):
    return LoggerConfig(
        log_dir=str(directory.path.parent),
        run_name="demo",
        console=ConsoleMode.plain,
        num_sample_answers=2,
        report=True,
        wandb=WandbConfig(
            mode=mode,
            project="nemo-like-tests",
            name=None,
            entity=None,
            group=None,
            job_type=None,
            tags=[],
            notes=None,
            system_metrics=False,
        ),
        tensorboard=TensorboardConfig(enabled=tensorboard),
        mlflow=MlflowConfig(enabled=mlflow, tracking_uri=None, experiment_name="nemo-like-tests"),
        prometheus=PrometheusConfig(port=None, host="127.0.0.1"),
        own={},
        trace_steps=[],
        profile=ProfileConfig(steps=[], processes=[]),
        nvtx_ranges=False,
    )


def test_passwords_reach_neither_the_terminal_nor_the_files(directory):
    stream = io.StringIO()
    with make_logger(directory, stream) as logger:
        logger.status("asking http://me:secret@host")
        logger.warn("http://me:secret@host said no")
        logger.finish(RunSummary(outcome="failed: http://me:secret@host/x?token=secret", exit_code=1))
    told = stream.getvalue() + directory.events_path.read_text()
    assert "secret" not in told
    assert "warning: http://me:***@host said no" in told and "http://me:***@host/x?token=***" in told


def make_logger(
    directory, stream, mode=WandbMode.disabled, max_num_steps=2, report=ReportRecorder, **backends
):
    cfg = logger_config(directory, mode, **backends)
    return RunLogger(
        cfg, directory, resolved_config={}, max_num_steps=max_num_steps, report=report, stream=stream
    )


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
        answer = SampleAnswer("12+34=", "46", "46", 1.0, True)
        logger.finish(RunSummary(outcome="finished", sample_answers=[answer]))
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("starting engines")
    assert "held-out accuracy  0.250 -> 0.750" in lines
    assert "  12+34=46  right" in lines
    assert lines[-1] == f"run_dir: {directory.path}"
    assert read_metrics(directory.metrics_path) == [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "train/reward": 0.5},
        {"step": 2, "train/reward": 0.75, "validation/accuracy": 0.75},
    ]
    assert directory.learning_curve_path.read_bytes().startswith(b"\x89PNG")
    assert directory.report_path.read_text().startswith("<!DOCTYPE html>")
    assert list((directory.path / "wandb").glob("offline-run-*"))
    for name in ("metrics.jsonl", "learning_curve.png", "report.html", "logs", "wandb"):
        assert any(str(directory.path / name) in line for line in lines)


def test_what_the_console_says_is_kept_for_who_watches_from_elsewhere(directory):
    with make_logger(directory, io.StringIO()) as logger:
        logger.status("starting engines")
        logger.warn("a disk is slow")
        logger.log_step(1, {"train/reward": 0.5})
        logger.flush(1)
        logger.finish(RunSummary(outcome="was interrupted", exit_code=130))
    events = [Event.from_json(json.loads(line)) for line in directory.events_path.read_text().splitlines()]
    assert [(event.kind.value, event.text or event.step, event.exit_code) for event in events] == [
        ("status", "starting engines", None),
        ("note", "warning: a disk is slow", None),
        ("step", 1, None),
        ("status", "writing the results", None),
        ("ended", "was interrupted", 130),
    ]
    times = [event.time_s for event in events]
    assert times == sorted(times)


def test_the_report_is_written_after_the_word_on_how_the_run_ended(directory):
    told = []

    class Report:
        def log(self, step, metrics): ...

        def log_answers(self, step, answers): ...

        def close(self):
            told.append(directory.events_path.read_text().splitlines()[-1])

    with make_logger(directory, io.StringIO(), report=lambda _: Report()) as logger:
        logger.finish(RunSummary(outcome="finished"))
    (last,) = told
    assert Event.from_json(json.loads(last)).text == "finished"


def test_an_evaluation_has_no_curve_of_its_one_point(directory):
    stream = io.StringIO()
    with make_logger(directory, stream, max_num_steps=0) as logger:
        logger.log_validation(80, {"validation/accuracy": 0.5})
        logger.finish(RunSummary(outcome="finished"))
    assert not directory.learning_curve_path.exists()
    assert "The evaluation finished. It took " in stream.getvalue()
    assert "The run" not in stream.getvalue()


def test_the_last_words_of_a_run_whose_ray_is_gone_are_kept_too(directory):
    with make_logger(directory, io.StringIO()) as logger:
        logger.last_words("failed: gcs_server died")
    (event,) = [Event.from_json(json.loads(line)) for line in directory.events_path.read_text().splitlines()]
    assert event.text == "failed: gcs_server died"


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


def wandb_run_id(directory, given=None, mode=WandbMode.offline):
    with RunLogger(
        logger_config(directory, mode),
        directory,
        resolved_config={},
        max_num_steps=2,
        wandb_run_id=given,
        stream=io.StringIO(),
    ) as logger:
        return logger.wandb_run_id


def test_a_run_that_was_killed_before_its_first_checkpoint_is_continued_in_wandb(tmp_path):
    first, second = (RunDirectory.create(str(tmp_path), "demo") for _ in range(2))
    run_id = wandb_run_id(first)
    assert wandb_run_id(first) == run_id
    assert wandb_run_id(second) != run_id
    assert wandb_run_id(second, given="abc12345") == "abc12345"  # that of a checkpoint from elsewhere
    assert wandb_run_id(second) == "abc12345"


def test_a_run_without_wandb_keeps_no_id_of_it(directory):
    wandb_run_id(directory, mode=WandbMode.disabled)
    assert not directory.wandb_run_id_path.exists()


def test_a_run_that_goes_back_to_a_checkpoint_sends_no_step_twice(directory, monkeypatch, capfd):
    monkeypatch.setattr("nemo_like.observability.logger._FINISH_S", 60.0)
    with make_logger(directory, io.StringIO(), WandbMode.offline, tensorboard=True) as logger:
        for step in (1, 2, 3, 4):
            logger.log_step(step, {"train/reward": 0.5})
        logger.continue_after(1)
        for step in (2, 3, 4, 5):
            logger.log_step(step, {"train/reward": 0.25})
            if step == 4:  # which the first attempt did not reach
                logger.log_validation(step, {"validation/accuracy": 0.75})
        logger.finish(RunSummary(outcome="finished"))
    assert "monotonically" not in "".join(capfd.readouterr())
    steps = [record["step"] for record in read_metrics(directory.metrics_path)]
    assert steps == [1, 2, 3, 4, 5]
    events = EventAccumulator(str(directory.tensorboard_path)).Reload()
    assert [event.step for event in events.Scalars("train/reward")] == [1, 2, 3, 4, 5]
    assert [event.step for event in events.Scalars("validation/accuracy")] == [4]


def test_every_back_end_that_is_enabled_gets_the_metrics(directory, monkeypatch):
    monkeypatch.setattr("nemo_like.observability.logger._FINISH_S", 60.0)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", str(directory.path / "mlruns"))
    stream = io.StringIO()
    with make_logger(directory, stream, tensorboard=True, mlflow=True) as logger:
        run_two_steps(logger)
        logger.finish(RunSummary(outcome="finished"))
    assert "warning" not in stream.getvalue()
    assert f"TensorBoard     {directory.tensorboard_path}" in stream.getvalue()
    (events,) = directory.tensorboard_path.iterdir()
    assert b"train/reward" in events.read_bytes()
    assert list((directory.path / "mlruns").glob("*/*/metrics/train/reward"))


@pytest.mark.parametrize("damaged", [b"\xff\xfe", b"two\nlines", b"a/b", b"x" * 200])
def test_a_damaged_id_of_wandb_costs_a_warning_and_no_run(tmp_path, damaged):
    directory = RunDirectory.create(str(tmp_path), "demo")
    directory.wandb_run_id_path.write_bytes(damaged)
    stream = io.StringIO()
    with make_logger(directory, stream, mode=WandbMode.offline) as logger:
        assert logger.wandb_run_id.isalnum()
    assert f"warning: {directory.wandb_run_id_path} held no id" in stream.getvalue()
    assert directory.wandb_run_id_path.read_text() == logger.wandb_run_id


def test_a_run_continues_over_a_damaged_line_of_metrics_with_a_warning(directory):
    directory.metrics_path.write_bytes(b'{"step": 1, "train/reward": 0.5}\n\xff{\n{"step": 2}\n{"step": 3}\n')
    stream = io.StringIO()
    with make_logger(directory, stream) as logger:
        logger.continue_after(2)
    assert stream.getvalue().count(f"warning: {directory.metrics_path}:2 is no line of metrics") == 1
    assert [record["step"] for record in read_metrics(directory.metrics_path)] == [1, 2]


def test_what_the_summary_prints_for_a_shell_can_be_pasted(tmp_path):
    directory = RunDirectory.create(str(tmp_path / "my runs"), "a demo")
    stream = io.StringIO()
    with make_logger(directory, stream, mode=WandbMode.offline) as logger:
        logger.finish(RunSummary(outcome="finished"))
    command = re.search(r"upload: (wandb sync .*)\)", stream.getvalue())[1]
    assert shlex.split(command) == ["wandb", "sync", f"{directory.wandb_path}/offline-run-*"]
    assert "*'" not in command  # the shell shall expand it
