"""Which data-parallel rank gets which samples, and its schedule; on metadata alone, standard library only.

Both stages place a sample on the same rank, so that a worker finds in the training stage what it
fetched and wrote in the log-prob stage. An optimizer update is ``global_batch_size`` consecutive
samples whatever the number of ranks: DP=1 and DP=2 train on the same global batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.data_plane.batching import Strategy, fixed_size, round_up
from nemo_like.data_plane.meta import GlobalBatch, KVBatchMeta, MicroBatch, Schedule

# Whole chunks stay on one rank where the fullest rank then gets at most this much more tokens than an
# equal share: one slice per chunk is moved instead of many.
_CHUNK_SLACK = 1.05

Placement = list[list[list[int]]]  # [update][rank] -> positions in the meta, ascending


def shard_for_training(
    meta: KVBatchMeta,
    *,
    num_shards: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    length_multiple: int = 1,
    strategy: Strategy | None = None,
) -> tuple[KVBatchMeta, ...]:
    """One meta per data-parallel rank, with the schedule of its optimizer updates.

    Needs tags ``sample_mask`` (0 or 1) and ``num_response_tokens``: the global counts that normalise
    the loss are over the samples with sample_mask 1. Micro-batches are of ``micro_batch_size`` samples,
    their lengths rounded up to a ``length_multiple`` where a parallel layout needs it, or what
    ``strategy`` makes.

    Raises ValueError when the sizes do not divide.
    """
    strategy = _strategy(strategy, micro_batch_size, length_multiple)
    placement = _place(meta, num_shards, global_batch_size)
    return _assemble(meta, placement, placement, strategy)


def shard_for_logprobs(
    meta: KVBatchMeta,
    *,
    num_shards: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    length_multiple: int = 1,
    strategy: Strategy | None = None,
) -> tuple[KVBatchMeta, ...]:
    """As ``shard_for_training`` and with the same samples in the same order on every rank, but all of
    them in one schedule entry, since a forward pass knows no updates."""
    strategy = _strategy(strategy, micro_batch_size, length_multiple)
    placement = _place(meta, num_shards, global_batch_size)
    together = [[[row for update in placement for row in update[rank]] for rank in range(num_shards)]]
    return _assemble(meta, placement, together, strategy)


def _strategy(strategy: Strategy | None, micro_batch_size: int | None, length_multiple: int) -> Strategy:
    if (strategy is None) == (micro_batch_size is None):
        raise ValueError(
            "micro-batches are cut either by micro_batch_size or by a strategy; give one of them"
        )
    return strategy or fixed_size(micro_batch_size or 0, length_multiple)


def _place(meta: KVBatchMeta, num_shards: int, global_batch_size: int) -> Placement:
    """Each update's samples dealt to the ranks: equally many each, tokens balanced."""
    if num_shards < 1 or global_batch_size % num_shards:
        raise ValueError(
            f"train_global_batch_size={global_batch_size} must be a multiple of "
            f"data_parallel_size={num_shards}; try {round_up(global_batch_size, max(1, num_shards))}"
        )
    if not len(meta) or len(meta) % global_batch_size:
        raise ValueError(
            f"partition {meta.partition!r}: {len(meta)} samples do not divide into updates of "
            f"train_global_batch_size={global_batch_size}"
        )
    if num_shards == 1:
        return [
            [list(range(start, start + global_batch_size))]
            for start in range(0, len(meta), global_batch_size)
        ]
    lengths = meta.lengths
    homes = _whole_chunks(meta, lengths, range(len(meta)), num_shards)
    return [
        _place_update(meta, lengths, range(start, start + global_batch_size), num_shards, homes)
        for start in range(0, len(meta), global_batch_size)
    ]


def _place_update(
    meta: KVBatchMeta,
    lengths: Sequence[int],
    positions: range,
    num_shards: int,
    homes: list[list[int]] | None,
) -> list[list[int]]:
    """Whole chunks where balanced enough: those of the batch (an update has a few rows of every chunk), or
    those of this update (it has every row of a few chunks). Single rows otherwise."""
    # No placement can do better than equal shares.
    enough = _CHUNK_SLACK * sum(lengths[position] for position in positions) / num_shards
    by_home = homes and [[row for row in home if row in positions] for home in homes]
    for ranks in (by_home, _whole_chunks(meta, lengths, positions, num_shards)):
        if ranks and len({len(rows) for rows in ranks}) == 1 and _fullest(ranks, lengths) <= enough:
            return ranks
    return _deal([[position] for position in positions], lengths, num_shards)


def _whole_chunks(
    meta: KVBatchMeta, lengths: Sequence[int], positions: range, num_shards: int
) -> list[list[int]] | None:
    """The positions dealt chunk by chunk; None where that gives the ranks unequal numbers of rows."""
    chunks: dict[int, list[int]] = {}
    for position in positions:
        chunks.setdefault(meta.rows[position][0], []).append(position)
    of_equal_size = len({len(rows) for rows in chunks.values()}) == 1
    if not of_equal_size or len(chunks) % num_shards:
        return None
    return _deal(list(chunks.values()), lengths, num_shards)


def _deal(groups: list[list[int]], lengths: Sequence[int], num_shards: int) -> list[list[int]]:
    """Groups of equally many rows to the ranks, in rounds of one group each, heaviest round first.

    In a round the heaviest group goes to the rank with the fewest tokens, and so on. Two ranks' loads
    then never differ by more than the heaviest group differs from the lightest.
    """
    weight = [sum(lengths[position] for position in group) for group in groups]
    order = sorted(range(len(groups)), key=lambda index: (-weight[index], index))
    ranks: list[list[int]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    for start in range(0, len(order), num_shards):
        emptiest = sorted(range(num_shards), key=lambda rank: (load[rank], rank))
        for rank, index in zip(emptiest, order[start : start + num_shards], strict=True):
            ranks[rank] += groups[index]
            load[rank] += weight[index]
    return [sorted(rows) for rows in ranks]


def _fullest(ranks: list[list[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[position] for position in rows) for rows in ranks)


def _assemble(
    meta: KVBatchMeta,
    placement: Placement,
    scheduled: Placement,
    strategy: Strategy,
) -> tuple[KVBatchMeta, ...]:
    """Shards, each with a schedule that has one entry per ``scheduled``.

    A shard's samples are in the order of storage, so that whole chunks move in one piece.
    """
    num_shards = len(placement[0])
    shards = [
        sorted((row for update in placement for row in update[rank]), key=meta.rows.__getitem__)
        for rank in range(num_shards)
    ]
    where = [{row: index for index, row in enumerate(rows)} for rows in shards]
    lengths, valid, tokens = meta.lengths, meta.tag("sample_mask"), meta.tag("num_response_tokens")
    batches: list[list[GlobalBatch]] = [[] for _ in range(num_shards)]
    for ranks in scheduled:
        of_ranks = [[lengths[row] for row in rows] for rows in ranks]
        cut = strategy.cut(of_ranks)
        common = [
            strategy.common_length(
                [[of_ranks[rank][i] for i in cut[rank][number]] for rank in range(num_shards)]
            )
            for number in range(len(cut[0]))
        ]
        rows_of_all = [row for rows in ranks for row in rows if valid[row]]
        for rank, rows in enumerate(ranks):
            micro_batches = tuple(
                MicroBatch(tuple(where[rank][rows[index]] for index in indices), common[number])
                for number, indices in enumerate(cut[rank])
            )
            batches[rank].append(
                GlobalBatch(len(rows_of_all), sum(int(tokens[row]) for row in rows_of_all), micro_batches)
            )
    return tuple(
        meta.subset(rows).with_schedule(
            Schedule(tuple(batches[rank]), strategy.layout, strategy.length_multiple)
        )
        for rank, rows in enumerate(shards)
    )
