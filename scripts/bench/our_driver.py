"""This framework's driver for benchmarks that make its steps themselves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_like.configuration import Config
from nemo_like.driver.setup import started
from nemo_like.driver.stopping import StopRequests
from nemo_like.driver.sync_grpo import SyncGRPODriver
from nemo_like.driver.whole_run import run_checkpoints
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory


@contextmanager
def started_driver(cfg: Config, directory: Path) -> Iterator[SyncGRPODriver]:
    """Start the processes of a run that trains, in ``directory``, and end them when the block is left. The
    driver prints nothing."""
    run_directory = RunDirectory.create(str(directory), "bench")
    checkpoints, stop_requests = run_checkpoints(cfg, run_directory), StopRequests(cfg.checkpointing)
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        RunLogger(cfg.logger, run_directory, resolved_config={}, max_num_steps=0, stream=nowhere) as logger,
        started(cfg, run_directory, logger, checkpoints, stop_requests) as run,
    ):
        assert isinstance(run.driver, SyncGRPODriver)  # what a configuration that trains has
        yield run.driver
