"""A run as far as a sweep sees one: it takes the arguments of run_grpo.py, and ends at once.

Its accuracy is its learning rate. With grpo.seed=2 it fails. With grpo.seed=3 or 5 it waits for an interrupt;
with 5 it ends as a run that has saved.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from nemo_like.configuration import load_config


def main() -> int:
    cfg = load_config(sys.argv[2], sys.argv[3:])
    directory = Path(cfg.logger.log_dir, str(cfg.logger.run_name))
    print(f"seed {cfg.grpo.seed} as {cfg.logger.wandb.name} of {cfg.logger.wandb.group}", flush=True)
    if cfg.grpo.seed == 2:
        return 1
    line = {"step": 4, "validation/accuracy": cfg.policy.optimizer.lr, "train/reward": 0.5}
    (directory / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    (directory / "report.html").touch()  # as of a run with logger.report
    ends = {3: 130, 5: 75}
    return _wait_for_interrupt(ends[cfg.grpo.seed]) if cfg.grpo.seed in ends else 0


def _wait_for_interrupt(exit_code: int) -> int:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print("waiting", flush=True)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        return exit_code
    return 1


if __name__ == "__main__":
    sys.exit(main())
