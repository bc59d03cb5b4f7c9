"""Rules on where policy workers and engines are placed, and on how weights reach engines."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.derived import shares_gpus
from nemo_like.config.places import placement, weight_replicas
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.config.schema import Config, Device, WeightTransport


def placement_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem with the engines' placement and with the weight transport."""
    yield from _nodes(cfg)
    transport, device = cfg.generation.weight_transport, cfg.policy.device
    if shares_gpus(cfg) and transport is WeightTransport.collective:
        yield Problem(
            key="generation.weight_transport=collective",
            rule=(
                "is impossible with cluster.placement=colocated and policy.device=cuda: NCCL carries nothing "
                "between two processes on one GPU"
            ),
            remedy="set it to auto",
        )
    if transport is WeightTransport.shared_memory and device is Device.cuda:
        yield Problem(
            key="generation.weight_transport=shared_memory",
            rule="maps host memory, and with policy.device=cuda the weights are on GPUs",
            remedy="set it to auto",
        )
    if transport is WeightTransport.cuda_ipc and device is Device.cpu:
        yield Problem(
            key="generation.weight_transport=cuda_ipc",
            rule="maps a GPU's memory, and with policy.device=cpu the weights are on the host",
            remedy="set it to auto",
        )


def _nodes(cfg: Config) -> Iterator[Problem]:
    if cfg.cluster.address is None and cfg.cluster.num_nodes > 1:
        yield Problem(
            key=f"cluster.num_nodes={cfg.cluster.num_nodes}",
            rule="must be 1 with cluster.address=null, which starts a private Ray on this machine alone",
            remedy="join a Ray cluster with cluster.address=auto (docs/slurm.md)",
        )
        return
    try:
        weight_replicas(cfg, placement(cfg))
    except ConfigError as error:
        yield from error.problems
