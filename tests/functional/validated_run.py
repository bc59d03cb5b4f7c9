"""A short run with two training sources and two held-out sets, which several files of tests look at."""

from __future__ import annotations

import json
import os
from pathlib import Path
from unittest import mock

from tests.functional.runs import FEWEST_PROCESSES, FinishedRun, run_grpo

NUM_PROBLEMS, NUM_ANSWERS = 24, 4  # of each held-out set, and to each problem
MAX_STEPS = 20
# An environment variable that the configuration asks for, and what it says.
SECRET, TOKEN = "KEY_OF_THE_RUN", "hunter2-hunter2"


def write_problems(path: Path) -> None:
    """Write thirty problems with how difficult they are, and ten that are too long."""
    with path.open("w") as file:
        for number in range(40):
            prompt = f"{number % 10}1+21=" if number < 30 else "1" * 60 + "="
            record = {
                "prompt": prompt,
                "answer": f"{number % 10 + 2}20",
                "metadata": {"level": "easy" if number % 3 else "hard"},
            }
            file.write(json.dumps(record) + "\n")


def held_out(problems: Path) -> list[str]:
    """Arguments for two held-out sets, one of which says how difficult its problems are."""
    return [
        "data.validation=[{name: pairs}, "
        f"{{name: file, kind: jsonl, path: {problems}, difficulty_key: metadata.level}}]",
        f"grpo.max_val_samples={NUM_PROBLEMS}",
        f"grpo.num_val_generations_per_prompt={NUM_ANSWERS}",
        # Without tokens that have no text of their own: what a server says of them reads as other tokens.
        "generation.validation.min_p=0.01",
        *FEWEST_PROCESSES,
    ]


def validated_run(directory: Path, problems: Path) -> FinishedRun:
    """Train on two sources, 3 to 1, until any problem of the generated set is solved by any of four answers,
    which is after the first step. Nothing is scored first."""
    arguments = [
        *held_out(problems),
        "data.train=[{name: pairs, weight: 3}, "
        f"{{name: file, kind: jsonl, path: {problems}, env: arithmetic}}]",
        f"grpo.max_num_steps={MAX_STEPS}",
        *("grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=2"),
        *("grpo.val_at_start=false", "grpo.val_period=1"),
        *("grpo.val_stop_metric=validation/pairs/pass@4", "grpo.val_stop_threshold=0.01"),
        "policy.train_global_batch_size=32",
        *("policy.scheduler.warmup_updates=0", "policy.scheduler.decay_style=constant"),
        *("rollout.dump_period=1", "rollout.dump_validation=true"),
        "loss_fn.use_generation_logprobs_as_prev=true",
        "logger.wandb.mode=offline",
        f"vars.token=${{oc.env:{SECRET}}}",
    ]
    with mock.patch.dict(os.environ, {SECRET: TOKEN}):
        return run_grpo(directory, arguments)
