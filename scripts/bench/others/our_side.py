"""This framework's process in ``against_others.py``: a run's driver, whose steps are made turn by turn."""

from __future__ import annotations

import os
import tempfile

from nemo_like.configuration import load_config
from nemo_like.driver.setup import started
from nemo_like.driver.stopping import StopRequests
from nemo_like.driver.sync_grpo import SyncGRPODriver
from nemo_like.driver.whole_run import run_checkpoints
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.rules.rules import validate
from scripts.bench.others.turns import SideTurns, side_arguments


def main() -> None:
    options = side_arguments(__doc__)
    cfg = load_config(options.config, [*options.overrides, "logger.wandb.mode=disabled"])
    validate(cfg)
    with tempfile.TemporaryDirectory() as directory, open(os.devnull, "w", encoding="utf-8") as nowhere:
        run_directory = RunDirectory.create(directory, "bench")
        checkpoints = run_checkpoints(cfg, run_directory)
        stop_requests = StopRequests(cfg.checkpointing)
        with (
            RunLogger(
                cfg.logger, run_directory, resolved_config={}, max_num_steps=0, stream=nowhere
            ) as logger,
            started(cfg, run_directory, logger, checkpoints, stop_requests) as run,
        ):
            assert isinstance(run.driver, SyncGRPODriver)  # what a configuration that trains has
            make_turns(run.driver, options.pipe, cfg.grpo.num_samples_per_step)


def make_turns(driver: SyncGRPODriver, pipe: int, num_samples: int) -> None:
    """Make steps as long as the benchmark asks for turns."""
    step = 0
    driver.begin_stretch(step)
    turns = SideTurns(pipe, lambda: driver.held_out(step).metrics["validation/accuracy"])
    while turns.is_open:
        step += 1
        metrics = driver.step(step).metrics
        turns.step_ended(round(metrics["train/mean_gen_tokens_per_sample"] * num_samples))
