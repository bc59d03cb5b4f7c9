from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from nemo_like.config.schema import WandbConfig, WandbMode
from nemo_like.observability.wandb_logger import WandbLogger


def config(mode):
    return WandbConfig(mode=mode, project="nemo-like-tests", name=None)


def test_offline_leaves_a_run_directory_with_what_was_logged(tmp_path):
    logger = WandbLogger(config(WandbMode.offline), tmp_path, {"grpo": {"seed": 1}})
    for step in range(3):
        logger.log(step, {"train/reward": step / 2})
    assert logger.finish(timeout_s=60.0) is None
    (stored,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"train/reward" in stored.read_bytes()


def test_no_call_waits_for_wandb_to_start(tmp_path):
    started_s = time.monotonic()
    logger = WandbLogger(config(WandbMode.offline), tmp_path, {})
    logger.log(1, {"train/reward": 0.5})
    elapsed_s = time.monotonic() - started_s
    assert logger.finish(timeout_s=60.0) is None
    assert elapsed_s < 0.5


def test_disabled_writes_nothing_and_starts_nothing(tmp_path):
    before = threading.active_count()
    logger = WandbLogger(config(WandbMode.disabled), tmp_path, {})
    logger.log(1, {"train/reward": 0.5})
    assert threading.active_count() == before
    assert logger.finish(timeout_s=1.0) is None
    assert list(tmp_path.iterdir()) == []


def test_finishing_twice_is_safe(tmp_path):
    logger = WandbLogger(config(WandbMode.offline), tmp_path, {})
    assert logger.finish(timeout_s=60.0) is None
    assert logger.finish(timeout_s=60.0) is None


def test_online_without_a_key_is_a_warning_that_says_what_to_do(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    logger = WandbLogger(config(WandbMode.online), tmp_path, {})
    problem = logger.finish(timeout_s=60.0)
    assert problem is not None
    assert "run `wandb login` once, or set mode=offline" in problem


def test_an_expired_deadline_is_reported_and_not_waited_for(tmp_path):
    logger = WandbLogger(config(WandbMode.offline), tmp_path, {})
    release = threading.Event()
    logger._tasks.put(lambda run: release.wait(60.0))
    started_s = time.monotonic()
    problem = logger.finish(timeout_s=0.2)
    elapsed_s = time.monotonic() - started_s
    release.set()
    for thread in threading.enumerate():
        if thread.name == "wandb":
            thread.join(60.0)
    assert problem is not None
    assert "did not finish within 0.2 s" in problem
    assert elapsed_s < 5.0


@pytest.mark.parametrize("module", ["torch", "ray", "tensordict", "transformers"])
def test_neither_the_loggers_nor_wandb_load_a_heavy_library(module):
    code = (
        "import sys, wandb\n"
        "import nemo_like.observability.logger, nemo_like.observability.live_console\n"
        f"sys.exit({module!r} in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
