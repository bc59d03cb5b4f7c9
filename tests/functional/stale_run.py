"""``run_grpo.py`` with engines on which one weight stays what it was: ``WEIGHT ARGUMENTS``."""

from __future__ import annotations

import sys
from dataclasses import replace

import run_grpo
from nemo_like.cluster.actors import ActorHandle, ActorSpec
from nemo_like.cluster.cluster import Cluster

_start = Cluster.start


def main(weight: str, *arguments: str) -> int:
    def start(cluster: Cluster, spec: ActorSpec) -> ActorHandle:
        if spec.target.endswith(":VllmEngine"):
            target = "tests.functional.stale_engine:StaleEngine"
            spec = replace(spec, target=target, env={**spec.env, "STALE": weight})
        return _start(cluster, spec)

    Cluster.start = start  # type: ignore[method-assign]
    return run_grpo.main(arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
