"""The parallel layout and the micro-batches that a worker group's keys ask for. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.batch.micro_batches import (
    MicroBatching,
    dynamic_batches,
    fixed_size,
    in_order,
    sequence_packing,
)
from nemo_like.batch.prompt_sharing import PromptSharing
from nemo_like.cluster.coordinates import Coordinates, ParallelLayout
from nemo_like.policy.backends.backend_kind import axis_size, backend_kind_of
from nemo_like.policy.groups.layout import dynamic_length_multiple, length_multiple
from nemo_like.policy.options import MicroBatchOrder, TrainedGroupConfig, WorkerGroupConfig

# The data-parallel replicas that send weights, unless engines on several nodes have a replica on each.
FIRST_REPLICA = (0,)


def parallel_layout(cfg: WorkerGroupConfig) -> ParallelLayout:
    """Return how many ranks the worker group has on each axis."""
    sizes = {axis: axis_size(cfg, axis) for axis in ("tp", "cp", "pp", "ep", "etp")}
    return ParallelLayout(dp=cfg.data_parallel_size, **sizes)


def shards_optimizer(cfg: WorkerGroupConfig) -> bool:
    """Return whether Megatron-core's optimizer spreads its state over data-parallel ranks.

    The spread and the whole optimizer have different checkpoint formats, so the key also decides where there
    is a single rank and nothing to spread.
    """
    return isinstance(cfg, TrainedGroupConfig) and cfg.megatron_cfg.use_distributed_optimizer


def gathers_weights(
    cfg: WorkerGroupConfig, coordinates: Coordinates, replicas: Sequence[int] = FIRST_REPLICA
) -> bool:
    """Return whether this worker takes part when the weight senders of ``replicas`` gather weights.

    With some backends every worker does. With others only the ranks in a sender's own groups do: its
    tensor-parallel group holds the parts of each tensor, its group of experts the parts of each expert.
    """
    layout = coordinates.layout
    return backend_kind_of(cfg).all_gather_weights or any(
        is_beside_sender(coordinates, size, replicas) for size in (layout.tp, layout.expert_ranks)
    )


def is_beside_sender(coordinates: Coordinates, group_size: int, replicas: Sequence[int]) -> bool:
    """Return whether a weight sender of ``replicas`` is in this rank's group, where each pipeline stage is
    cut into groups of ``group_size`` consecutive ranks.

    The sender is the first rank of its replica in the stage.
    """
    layout = coordinates.layout
    own = coordinates.rank % layout.stage_size // group_size
    return own in {replica * layout.tp * layout.cp // group_size for replica in replicas}


def train_strategy(cfg: TrainedGroupConfig) -> MicroBatching:
    """Return the strategy that makes micro-batches of the samples of an update."""
    if cfg.sequence_packing.enabled:
        return _packing_strategy(cfg, cfg.sequence_packing.train_mb_tokens)
    if cfg.dynamic_batching.enabled:
        return dynamic_batches(cfg.dynamic_batching.train_mb_tokens, dynamic_length_multiple(cfg))
    return _fixed_strategy(cfg, cfg.train_micro_batch_size)


def logprob_strategy(cfg: WorkerGroupConfig) -> MicroBatching:
    """Return the strategy that makes micro-batches for scoring. They may be larger than in training, since
    scoring keeps fewer activations."""
    if cfg.sequence_packing.enabled:
        return _packing_strategy(cfg, cfg.sequence_packing.logprob_mb_tokens)
    if cfg.dynamic_batching.enabled:
        return dynamic_batches(cfg.dynamic_batching.logprob_mb_tokens, dynamic_length_multiple(cfg))
    return _fixed_strategy(cfg, cfg.logprob_batch_size)


def _packing_strategy(cfg: WorkerGroupConfig, max_tokens: int) -> MicroBatching:
    kind = PromptSharing if cfg.sequence_packing.share_prompts else sequence_packing
    return kind(max_tokens, length_multiple(cfg))


def _fixed_strategy(cfg: WorkerGroupConfig, size: int) -> MicroBatching:
    kind = fixed_size if cfg.micro_batch_order is MicroBatchOrder.by_length else in_order
    return kind(size, length_multiple(cfg))
