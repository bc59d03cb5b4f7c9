from __future__ import annotations

import json
import subprocess
import sys

import pytest

from nemo_like.config.schema import WandbConfig, WandbMode
from nemo_like.observability.background import BackgroundLogger
from nemo_like.observability.summary import SampleAnswer
from nemo_like.observability.wandb_logger import WandbRecorder, new_run_id


def start(mode, directory, run_id):
    cfg = WandbConfig(mode=mode, project="nemo-like-tests", name=None)
    return BackgroundLogger("W&B", lambda: WandbRecorder(cfg, directory, {"grpo": {"seed": 1}}, run_id))


def test_offline_leaves_a_run_directory_with_what_was_logged(tmp_path):
    logger = start(WandbMode.offline, tmp_path, new_run_id())
    for step in range(3):
        logger.log(step, {"train/reward": step / 2})
    logger.log_answers(2, [SampleAnswer("21+43=", "650", "640", 0.0)])
    assert logger.finish(timeout_s=60.0) is None
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"train/reward" in stored.read_bytes()
    (table,) = stored.parent.glob("files/media/table/validation/answers*.json")
    assert json.loads(table.read_text())["data"] == [["21+43=", "650", "640", 0.0]]


def test_a_run_that_is_continued_keeps_its_id(tmp_path):
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
        logger = start(WandbMode.offline, tmp_path / str(step), "abc12345")
        logger.log(step, {"train/reward": 0.5})
        assert logger.finish(timeout_s=60.0) is None
    stored = list(tmp_path.glob("*/wandb/offline-run-*/run-abc12345.wandb"))
    assert len(stored) == 2


def test_online_without_a_key_is_a_warning_that_says_what_to_do(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    problem = start(WandbMode.online, tmp_path, new_run_id()).finish(timeout_s=60.0)
    assert problem is not None
    assert "run `wandb login` once, or set mode=offline" in problem


@pytest.mark.parametrize("module", ["torch", "ray", "tensordict", "transformers"])
def test_neither_the_loggers_nor_their_back_ends_load_a_heavy_library(module, tmp_path):
    code = (
        "import pathlib, sys, wandb\n"
        "import nemo_like.observability.logger, nemo_like.observability.live_console\n"
        "from nemo_like.observability.tensorboard_logger import TensorboardRecorder\n"
        f"TensorboardRecorder(pathlib.Path({str(tmp_path)!r})).close()\n"
        f"sys.exit({module!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
