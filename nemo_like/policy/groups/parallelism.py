"""Parallel layout and micro-batches as a policy's configuration has them. Standard library only."""

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

# The data-parallel replicas whose weights are sent, unless engines on several nodes have one each.
FIRST_REPLICA = (0,)


def parallel_layout(cfg: WorkerGroupConfig) -> ParallelLayout:
    """Return how many ranks the configured policy has on each axis."""
    tp, cp, pp, ep = (axis_size(cfg, axis) for axis in ("tp", "cp", "pp", "ep"))
    return ParallelLayout(tp=tp, cp=cp, dp=cfg.data_parallel_size, pp=pp, ep=ep)


def shards_optimizer(cfg: WorkerGroupConfig) -> bool:
    """Return whether the optimizer's state of Megatron-core is spread over data-parallel ranks.

    The spread and the whole optimizer have different checkpoint formats, so a single rank uses the configured
    kind too, though it has nothing to spread.
    """
    return isinstance(cfg, TrainedGroupConfig) and cfg.megatron_cfg.use_distributed_optimizer


def gathers_weights(
    cfg: WorkerGroupConfig, coordinates: Coordinates, replicas: Sequence[int] = FIRST_REPLICA
) -> bool:
    """Return whether this worker takes part when the weight senders of these replicas gather weights.

    With some backends every worker does. With others only the ranks in a sender's own groups do: its
    tensor-parallel group holds the parts of each tensor, its expert-parallel group the experts.
    """
    layout = coordinates.layout
    return backend_kind_of(cfg).all_gather_weights or any(
        is_beside_sender(coordinates, size, replicas) for size in (layout.tp, layout.ep)
    )


def is_beside_sender(coordinates: Coordinates, group_size: int, replicas: Sequence[int]) -> bool:
    """Return whether this rank's group of so many consecutive ranks of its pipeline stage has a weight sender
    of one of these replicas: the replica's first rank in the stage."""
    layout = coordinates.layout
    own = coordinates.rank % layout.stage_size // group_size
    return own in {replica * layout.tp * layout.cp // group_size for replica in replicas}


def train_strategy(cfg: TrainedGroupConfig) -> MicroBatching:
    """Return the strategy by which the samples of an update become micro-batches."""
    if cfg.sequence_packing.enabled:
        return _packing_strategy(cfg, cfg.sequence_packing.train_mb_tokens)
    if cfg.dynamic_batching.enabled:
        return dynamic_batches(cfg.dynamic_batching.train_mb_tokens, dynamic_length_multiple(cfg))
    return _fixed_strategy(cfg, cfg.train_micro_batch_size)


def logprob_strategy(cfg: WorkerGroupConfig) -> MicroBatching:
    """Return the strategy of the log-prob phases, which keep fewer activations and so allow larger
    micro-batches."""
    if cfg.sequence_packing.enabled:
        return _packing_strategy(cfg, cfg.sequence_packing.logprob_mb_tokens)
    if cfg.dynamic_batching.enabled:
        return dynamic_batches(cfg.dynamic_batching.logprob_mb_tokens, dynamic_length_multiple(cfg))
    return _fixed_strategy(cfg, cfg.logprob_batch_size)


def value_strategy(cfg: WorkerGroupConfig) -> MicroBatching:
    """Return the strategy of the phase in which a critic values samples. It is that of the log-prob phases,
    but samples do not share their prompts, since each has an end of its own."""
    if cfg.sequence_packing.enabled:
        return sequence_packing(cfg.sequence_packing.logprob_mb_tokens, length_multiple(cfg))
    return logprob_strategy(cfg)


def _packing_strategy(cfg: WorkerGroupConfig, max_tokens: int) -> MicroBatching:
    kind = PromptSharing if cfg.sequence_packing.share_prompts else sequence_packing
    return kind(max_tokens, length_multiple(cfg))


def _fixed_strategy(cfg: WorkerGroupConfig, size: int) -> MicroBatching:
    kind = fixed_size if cfg.micro_batch_order is MicroBatchOrder.by_length else in_order
    return kind(size, length_multiple(cfg))
