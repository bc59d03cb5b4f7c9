"""Reports of what every actor of the run is doing, on all nodes, when a stage has missed its deadline."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_like.cluster.stacks import ProcessDump, dump_processes, kill_processes

# How long the other nodes have to answer; starting a process on a busy node takes seconds.
_TIMEOUT_S = 60.0


class Watchdog:
    """Writes one file per report into ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def report(self, stage: str, log_paths: Mapping[str, str], waiting_for: Sequence[str]) -> str:
        """Write the stacks of all actors' processes to a file, and return a summary.

        ``log_paths`` maps an actor's name to the path of its log. The summary has a line for each process
        of an actor in ``waiting_for``, and for each other process that is stopped or in a call; then a line
        for each actor or node that could not be looked at; last, the path of the file.
        """
        found, problems = on_every_node(dump_processes, log_paths)
        # Nodes on one machine see each other's processes.
        dumps: list[ProcessDump] = list(
            {(dump.actor, dump.pid): dump for on_node in found for dump in on_node}.values()
        )
        missing = sorted(log_paths.keys() - {dump.actor for dump in dumps})
        problems += [f"{actor}: no process of it was found" for actor in missing]
        dumps.sort(key=lambda dump: (dump.actor not in waiting_for, dump.actor, dump.pid))
        where = self._write(stage, "\n\n".join([*problems, *(dump.text() for dump in dumps)]))
        telling = [dump for dump in dumps if dump.actor in waiting_for or dump.is_stopped or dump.is_in_call]
        return "\n".join([*(dump.summary() for dump in telling), *problems, where])

    def _write(self, stage: str, text: str) -> str:
        name = re.sub(r"[^\w.-]+", "-", stage).strip("-")
        number = 1 + len(list(self._directory.glob(f"stacks-{name}-*.txt")))
        path = self._directory / f"stacks-{name}-{number}.txt"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            return f"the stacks of all could not be written: {error}"
        return f"all stacks are in {path}"


def end_processes(log_paths: Mapping[str, str]) -> None:
    """Kill the actors' processes on every node. A stopped process would not follow Ray's request to end."""
    on_every_node(kill_processes, log_paths)


def on_every_node(function: Any, log_paths: Mapping[str, str]) -> tuple[list[Any], list[str]]:
    """Call ``function(log_paths)`` on every living node.

    Return its result from each node that answers, and a sentence for each node that does not.
    """
    own = ray.get_runtime_context().get_node_id()
    others = {
        ray.remote(num_cpus=0, max_retries=0)(function)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False))
        .remote(dict(log_paths)): node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"] and node["NodeID"] != own
    }
    found, problems = [function(log_paths)], []
    if others:
        ray.wait(list(others), num_returns=len(others), timeout=_TIMEOUT_S)
    for call, address in others.items():
        try:
            found.append(ray.get(call, timeout=0))
        except RayError as error:
            problems.append(f"node {address} was not looked at: {type(error).__name__}")
    return found, problems
