"""``run_grpo.py`` with a plan of what to kill, and when: ``VICTIM:STAGE@STEP,... ARGUMENTS``.

The driver's process kills the victim the moment it begins to wait for the stage, so that every kill hits the
stage that it is meant for; with an empty plan nothing is killed. A victim is an actor's name in
processes.json, "driver", a process of TransferQueue or Ray by a part of its command line, or "all" of them at
once. An engine or a policy worker with "out-of-memory/" before its name lives, and raises in what it
generates or trains next from the beginning of the step on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

import run_grpo
from nemo_like.cluster.actors import ActorHandle, ActorSpec
from nemo_like.cluster.cluster import Cluster
from tests.functional.leftovers import processes
from tests.functional.runs import MARK, kill_all

STAGES = {
    "weight_sync": "policy.push_weights",
    "generation": "generation",
    "logprobs": "policy.compute_logprobs",
    "train": "policy.train",
    "checkpoint": "policy.save_checkpoint",
}
# Of a run with a critic, and of one with a teacher, besides.
OTHER_STAGES = {
    "values": "value.compute_values",
    "value_train": "value.train",
    "teacher_logprobs": "teacher.compute_teacher_logprobs",
}
OUT_OF_MEMORY = "out-of-memory/"
_SHOWN = 15  # characters of a process's name
RAISING = {
    "nemo_like.generation.vllm_engine:VllmEngine": "tests.functional.out_of_memory_engine:RaisingEngine",
    "nemo_like.policy.workers.worker:PolicyWorker": "tests.functional.out_of_memory_worker:RaisingWorker",
}


def flag_of(run_dir: Path, actor: str) -> Path:
    return run_dir / f"out-of-memory-{actor}"


class Killer:
    """Stands in front of ``Cluster.gather``."""

    def __init__(self, plan: str, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._plan: dict[tuple[str, int], str] = {}  # victims by stage and step
        for kill in plan.split(",") if plan else ():
            victim, _, when = kill.rpartition(":")
            stage, step = when.split("@")
            self._plan[{**STAGES, **OTHER_STAGES}[stage], int(step)] = victim
        self._step = 0
        self._gather, self._start = Cluster.gather, Cluster.start

    def gather(self, cluster: Cluster, calls: Any, *, stage: str, **options: Any) -> list[Any]:
        if stage.startswith("opening partition 'train-"):
            self._step = int(stage.split("-")[1].rstrip("'"))
            self._raise_in_step()
        if (victim := self._plan.pop((stage, self._step), None)) is not None:
            self._kill(victim)
        return self._gather(cluster, calls, stage=stage, **options)

    def _raise_in_step(self) -> None:
        """Have those raise that are to in this step. When the driver waits for a stage, its call may have
        begun, so that is too late."""
        for (stage, step), victim in list(self._plan.items()):
            if step == self._step and victim.startswith(OUT_OF_MEMORY):
                del self._plan[stage, step]
                flag_of(self._run_dir, victim.removeprefix(OUT_OF_MEMORY)).touch()

    def start(self, cluster: Cluster, spec: ActorSpec, **options: Any) -> ActorHandle:
        """Start processes that can raise in the place of those that cannot.

        Their environment stays as it is, since others would start without the run's fork server.
        """
        if spec.target in RAISING:
            kwargs = {**spec.kwargs, "flag": flag_of(self._run_dir, spec.name)}
            spec = replace(spec, target=RAISING[spec.target], kwargs=kwargs)
        return self._start(cluster, spec, **options)

    def _kill(self, victim: str) -> None:
        if victim == "all":
            kill_all(os.environ[MARK])
        os.kill(self._pid(victim), signal.SIGKILL)

    def _pid(self, victim: str) -> int:
        if victim == "driver":
            return os.getpid()
        actors = json.loads((self._run_dir / "processes.json").read_text())
        if victim in actors:
            return actors[victim]
        # Those below a warm server do not descend from this process, and a title may stand where a mark was.
        # The command of this one has the victim's name, too.
        own = psutil.Process()
        others = {*own.children(recursive=True), *processes(os.environ[MARK])} - {own}
        return next(
            one.pid
            for one in others
            if victim in " ".join(one.cmdline()) or one.name() == f"ray::{victim}"[:_SHOWN]
        )


def main(plan: str, *arguments: str) -> int:
    values = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    killer = Killer(plan, Path(values["logger.log_dir"]) / values["logger.run_name"])

    def gather(cluster: Cluster, calls: Any, **options: Any) -> list[Any]:
        return killer.gather(cluster, calls, **options)

    def start(cluster: Cluster, spec: ActorSpec, **options: Any) -> ActorHandle:
        return killer.start(cluster, spec, **options)

    Cluster.gather = gather  # type: ignore[method-assign]
    Cluster.start = start  # type: ignore[method-assign]
    return run_grpo.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
