from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import time

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from nemo_like.observability.background import BackgroundLogger
from nemo_like.observability.logger_kinds.wandb import WandbConfig, WandbMode, WandbRecorder, end_processes
from nemo_like.observability.summary import SampleAnswer


def config(mode, **keys):
    values = {
        "project": "nemo-like-tests",
        "name": None,
        "entity": None,
        "group": None,
        "job_type": None,
        "tags": [],
        "notes": None,
        "system_metrics": False,
    }
    return WandbConfig(mode=mode, **{**values, **keys})


def start(mode, directory, run_id, **keys):
    cfg = config(mode, **keys)
    return BackgroundLogger(
        "W&B", lambda: WandbRecorder(cfg, directory, {"grpo": {"seed": 1}}, run_id), give_up=end_processes
    )


def test_offline_leaves_a_run_directory_with_what_was_logged(tmp_path):
    logger = start(WandbMode.offline, tmp_path, "1a2b3c4d")
    for step in range(3):
        logger.log(step, {"train/reward": step / 2})
    logger.log_answers(2, [SampleAnswer("21+43=", "650", "640", 0.0, False)])
    assert logger.finish(timeout_s=60.0) is None
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"train/reward" in stored.read_bytes()
    (table,) = stored.parent.glob("files/media/table/validation/answers*.json")
    assert json.loads(table.read_text())["data"] == [["21+43=", "650", "640", 0.0, False, None]]


def test_nothing_of_a_run_is_left_elsewhere_and_its_tables_lie_there_once(tmp_path, monkeypatch):
    home, temporary, directory = (tmp_path / name for name in ("home", "temporary", "run"))
    for path in (home, temporary, directory):
        path.mkdir()
    for name in ("XDG_CACHE_HOME", "XDG_DATA_HOME", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    logger = start(WandbMode.offline, directory, "1a2b3c4d")
    for step in range(5):
        logger.log_answers(step, [SampleAnswer("21+43=", "650", "640", 0.0, False)])
    assert logger.finish(timeout_s=60.0) is None
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in files if path.parts[0] == "home"] == []
    assert [
        path for path in files if path.name.endswith("answers.table.json") and path.parts[0] != "run"
    ] == []
    # Of what remains there until the run's end, W&B's own log alone.
    assert [path.parts[:3] for path in files if path.parts[0] == "temporary"] == [
        ("temporary", "wandb", "logs")
    ]
    (log,) = directory.glob("wandb/offline-run-*/logs/debug-core.log")
    assert log.is_file() and not log.is_symlink()
    assert not {"WANDB_CACHE_DIR", "WANDB_DATA_DIR"} & {*os.environ}


def test_a_run_that_is_continued_keeps_its_id(tmp_path):
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
        logger = start(WandbMode.offline, tmp_path / str(step), "abc12345")
        logger.log(step, {"train/reward": 0.5})
        assert logger.finish(timeout_s=60.0) is None
    stored = list(tmp_path.glob("*/wandb/offline-run-*/run-abc12345.wandb"))
    assert len(stored) == 2


def stored_records(directory):
    """What the offline file holds: after a header, a log in LevelDB's format, whose records are W&B's."""
    (stored,) = directory.glob("wandb/offline-run-*/run-*.wandb")
    data, block, header = stored.read_bytes(), 32768, 7
    position, record, records = header, b"", []
    while position < len(data):
        if block - position % block < header:  # the rest of a block that has no room for a chunk
            position += block - position % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += header + length
        record += data[position - length : position]
        if kind in (1, 4):  # a whole record, or the last part of one
            records.append(Record.FromString(record))
            record = b""
    return records


def test_a_run_has_the_keys_that_group_it_with_others(tmp_path):
    keys = {
        "entity": "team",
        "group": "ablation",
        "job_type": "train",
        "tags": ["qwen3-8b", "baseline"],
        "notes": "the first try",
    }
    logger = start(WandbMode.offline, tmp_path, "1a2b3c4d", **keys)
    logger.log(1, {"train/reward": 0.5})
    assert logger.finish(timeout_s=60.0) is None
    run = next(record.run for record in stored_records(tmp_path) if record.HasField("run"))
    stored = {
        "entity": run.entity,
        "group": run.run_group,
        "job_type": run.job_type,
        "tags": list(run.tags),
        "notes": run.notes,
    }
    assert stored == keys


def record_kinds(directory):
    return {record.WhichOneof("record_type") for record in stored_records(directory)}


def test_wandb_measures_the_machine_where_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_X_STATS_SAMPLING_INTERVAL", "0.1")
    logger = start(WandbMode.offline, tmp_path, "1a2b3c4d", system_metrics=True)
    logger.log(1, {"train/reward": 0.5})
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("wandb/*/*.wandb")) or "stats" not in record_kinds(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert logger.finish(timeout_s=60.0) is None


def test_wandb_measures_the_machine_not_by_itself(tmp_path):
    logger = start(WandbMode.offline, tmp_path, "1a2b3c4d")
    logger.log(1, {"train/reward": 0.5})
    assert logger.finish(timeout_s=60.0) is None
    assert "stats" not in record_kinds(tmp_path)


def test_a_step_before_the_latest_is_left_out_without_a_complaint(tmp_path, capfd):
    logger = start(WandbMode.offline, tmp_path, "1a2b3c4d")
    for step in (3, 2, 3, 4):
        logger.log(step, {"train/reward": 0.5})
        logger.log_answers(step, [])
    assert logger.finish(timeout_s=60.0) is None
    assert "monotonically" not in "".join(capfd.readouterr())


def test_online_without_a_key_is_a_warning_that_says_what_to_do(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    problem = start(WandbMode.online, tmp_path, "1a2b3c4d").finish(timeout_s=60.0)
    assert problem is not None
    assert "run `wandb login` once, or set mode=offline" in problem


@pytest.mark.parametrize("module", ["torch", "ray", "tensordict", "transformers"])
def test_neither_the_loggers_nor_their_back_ends_load_a_heavy_library(module, tmp_path):
    code = (
        "import pathlib, sys, wandb\n"
        "import nemo_like.observability.logger, nemo_like.observability.live_console\n"
        "from nemo_like.observability.logger_kinds.tensorboard import TensorboardRecorder\n"
        f"TensorboardRecorder(pathlib.Path({str(tmp_path)!r})).close()\n"
        f"sys.exit({module!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


HIT_SERVICE = """
import pathlib, sys, time
import psutil
from nemo_like.observability.logger_kinds.wandb import WandbMode
from tests.unit.observability.test_wandb_logger import start

logger = start(WandbMode.offline, pathlib.Path(sys.argv[1]), "abcdefgh")
logger.log(1, {"train/reward": 0.5})
while not (services := [one for one in psutil.Process().children() if "wandb-core" in one.name()]):
    time.sleep(0.02)  # the thread that starts it needs the interpreter, too
while not list(pathlib.Path(sys.argv[1]).glob("wandb/offline-run-*/*.wandb")):
    time.sleep(0.02)
HIT
logger.log(2, {"train/reward": 0.5})
print(logger.finish(timeout_s=DEADLINE), flush=True)
"""


def program(hit, deadline_s):
    return HIT_SERVICE.replace("HIT", hit).replace("DEADLINE", deadline_s)


def test_a_service_that_is_killed_costs_a_warning_and_no_traceback(tmp_path):
    killed = program("services[0].kill(); services[0].wait()", "60")
    command = [sys.executable, "-c", killed, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("W&B failed: ")
    assert "Traceback" not in done.stderr


def test_a_service_that_is_stopped_neither_keeps_the_process_nor_has_the_last_word(tmp_path):
    command = [sys.executable, "-c", program("services[0].suspend()", "1"), str(tmp_path)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("W&B did not finish within 1.0 s")
    assert "Traceback" not in done.stdout
