"""Checks where policy workers and engines are placed."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import ConfigError, Problem
from nemo_like.configuration import Config
from nemo_like.plan.places import placement, weight_replicas


def placement_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem of the number of nodes, and of placing workers and engines on them."""
    if cfg.cluster.address is None and cfg.cluster.num_nodes > 1:
        yield Problem(
            key=f"cluster.num_nodes={cfg.cluster.num_nodes}",
            rule="must be 1 with cluster.address=null, which starts a private Ray on this machine alone",
            remedy="join a Ray cluster with cluster.address=auto (docs/how_to/slurm.md)",
        )
        return
    try:
        weight_replicas(cfg, placement(cfg))
    except ConfigError as error:
        yield from error.problems
