"""This framework's process in ``against_others.py``: a run's driver, whose steps are made turn by turn."""

from __future__ import annotations

import tempfile
from pathlib import Path

from nemo_like.configuration import load_config
from nemo_like.driver.sync_grpo import SyncGRPODriver
from nemo_like.rules.rules import validate
from scripts.bench.others.turns import SideTurns, side_arguments
from scripts.bench.our_driver import started_driver


def main() -> None:
    options = side_arguments(__doc__)
    cfg = load_config(options.config, [*options.overrides, "logger.wandb.mode=disabled"])
    validate(cfg)
    with (
        tempfile.TemporaryDirectory() as directory,
        started_driver(cfg, Path(directory)) as driver,
    ):
        make_turns(driver, options.pipe, cfg.grpo.num_samples_per_step)


def make_turns(driver: SyncGRPODriver, pipe: int, num_samples: int) -> None:
    """Make steps as long as the benchmark asks for turns."""
    step = 0
    driver.begin_stretch(step)
    turns = SideTurns(pipe, lambda: driver.held_out(step).metrics["validation/accuracy"])
    while turns.is_open:
        step += 1
        metrics = driver.step(step).metrics
        turns.step_ended(round(metrics["train/mean_gen_tokens_per_sample"] * num_samples))
