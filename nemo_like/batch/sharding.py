"""Sharding: deals a batch's samples to updates and data-parallel ranks, and makes each rank's schedule.

It works on metadata alone and needs the standard library only. The log-prob stage and the training stage
place a sample on the same rank, so that in training a worker finds the values in its cache. An
update is ``global_batch_size`` consecutive samples whatever the number of ranks: DP=1 and DP=2 train on the
same global batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from nemo_like.batch.meta import GlobalBatch, KVBatchMeta, MicroBatch, Schedule
from nemo_like.batch.micro_batches import (
    MicroBatching,
    Prompt,
    fixed_size,
    longest_first,
    model_length,
    round_up,
)
from nemo_like.batch.tags import GROUP_ID, NUM_PROMPT_TOKENS, NUM_RESPONSE_TOKENS, SAMPLE_MASK

# A chunk's samples stay on one rank if the fullest rank then has at most this many times the tokens of an
# equal share: a whole chunk is moved as one slice, separate samples as many slices.
_CHUNK_SLACK = 1.05

RowsByRank = list[list[list[int]]]  # [update][rank] -> positions in the meta, ascending


def shard_for_training(
    meta: KVBatchMeta,
    *,
    num_shards: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    length_multiple: int = 1,
    strategy: MicroBatching | None = None,
    is_idle: Sequence[bool] | None = None,
) -> tuple[KVBatchMeta, ...]:
    """Return one meta per data-parallel rank, with the schedule of its updates.

    Needs tags ``sample_mask`` (0 or 1) and ``num_response_tokens``: the global counts that normalise
    the loss are over the samples with sample_mask 1. Either ``strategy`` makes the micro-batches, or they
    have at most ``micro_batch_size`` samples and lengths rounded up to a multiple of ``length_multiple``,
    where a parallel layout needs that. A strategy that shares prompts needs tags ``group_id`` and
    ``num_prompt_tokens``.

    Samples with ``is_idle`` true count in the global counts, but need not be computed. All ranks leave the
    same number of them out of an update's micro-batches: the most for which every rank keeps at least one
    row.

    Raises ValueError when samples do not divide into updates, or updates into shards, or unless exactly one
    of ``strategy`` and ``micro_batch_size`` is given.
    """
    strategy = _strategy(strategy, micro_batch_size, length_multiple)
    placement = _deal_updates(meta, num_shards, global_batch_size, strategy)
    working = placement
    if is_idle is not None:
        # The longest idle samples are left out first. Where prompts are shared, samples are left out in the
        # batch's order, so that neighbours, which share a prompt, go together.
        order = [0] * len(meta) if strategy.shares_prompts else [-length for length in meta.lengths]
        working = [_without_idle(ranks, is_idle, order) for ranks in placement]
    return _assemble(meta, placement, working, strategy)


def shard_for_logprobs(
    meta: KVBatchMeta,
    *,
    num_shards: int,
    global_batch_size: int,
    micro_batch_size: int | None = None,
    length_multiple: int = 1,
    strategy: MicroBatching | None = None,
) -> tuple[KVBatchMeta, ...]:
    """Return one meta per data-parallel rank, with one schedule entry for all its samples.

    Every rank has the same samples in the same order as in ``shard_for_training``; there is a single entry
    because forward passes know no updates. Arguments and errors are as in ``shard_for_training``.
    """
    strategy = _strategy(strategy, micro_batch_size, length_multiple)
    placement = _deal_updates(meta, num_shards, global_batch_size, strategy)
    together = [[[row for update in placement for row in update[rank]] for rank in range(num_shards)]]
    return _assemble(meta, together, together, strategy)


def shard_for_values(
    meta: KVBatchMeta,
    *,
    num_shards: int,
    global_batch_size: int,
    strategy: MicroBatching,
    train_strategy: MicroBatching,
) -> tuple[KVBatchMeta, ...]:
    """Return one meta per data-parallel rank, with one schedule entry for all its samples, ends included.

    Every rank has the same samples in the same order as in ``shard_for_training`` with ``train_strategy``;
    ``strategy`` makes the micro-batches. Raises ValueError when samples do not divide into updates, or
    updates into shards.
    """
    placement = _deal_updates(meta, num_shards, global_batch_size, train_strategy)
    together = [[[row for update in placement for row in update[rank]] for rank in range(num_shards)]]
    return _assemble(meta, together, together, strategy, with_ends=True)


def add_whole_groups(
    meta: KVBatchMeta, is_own: Sequence[bool], *, num_shards: int, strategy: MicroBatching
) -> KVBatchMeta:
    """Return the samples with ``is_own`` true, and whole other groups until the samples divide into shards.

    ``is_own`` is equal within a group. The number of samples becomes a multiple of ``num_shards``; where
    ``strategy`` shares prompts, the number of groups does, so that each group can stay on one rank. The
    groups with the fewest tokens are added; where there are too few, all are. Samples keep their order.
    """
    groups: dict[int, list[int]] = {}
    for position, (chunk, _) in enumerate(meta.rows):
        groups.setdefault(chunk, []).append(position)
    lengths = meta.lengths
    others = [group for group in groups.values() if not is_own[group[0]]]
    taken = [group for group in groups.values() if is_own[group[0]]]
    for group in sorted(others, key=lambda group: sum([lengths[position] for position in group])):
        count = len(taken) if strategy.shares_prompts else sum(map(len, taken))
        if count % num_shards == 0:
            break
        taken.append(group)
    return meta.subset(sorted(chain.from_iterable(taken)))


def without_first_update(shard: KVBatchMeta) -> KVBatchMeta:
    """Return a shard whose schedule has no micro-batches in its first update, with the other updates'
    samples.

    The gradients of the first update's samples were accumulated already; its counts stay in the schedule,
    since they normalise these gradients.
    """
    assert shard.schedule is not None, "a shard has a schedule"
    schedule = shard.schedule.without_first()
    updates = schedule.global_batches
    kept = sorted({row for update in updates for one in update.micro_batches for row in one.rows})
    row_in_shard = dict(zip(kept, range(len(kept)), strict=True))
    moved = [
        replace(
            update,
            micro_batches=tuple(
                [
                    one._replace(rows=tuple([row_in_shard[row] for row in one.rows]))
                    for one in update.micro_batches
                ]
            ),
        )
        for update in updates
    ]
    return shard.subset(kept).with_schedule(replace(schedule, global_batches=tuple(moved)))


def _strategy(
    strategy: MicroBatching | None, micro_batch_size: int | None, length_multiple: int
) -> MicroBatching:
    if (strategy is None) == (micro_batch_size is None):
        raise ValueError(
            "micro-batches are cut either by micro_batch_size or by a strategy; give one of them"
        )
    return strategy or fixed_size(micro_batch_size or 0, length_multiple)


def _deal_updates(
    meta: KVBatchMeta, num_shards: int, global_batch_size: int, strategy: MicroBatching
) -> RowsByRank:
    """Deal each update's samples to the ranks: the same number of samples each, with tokens balanced.

    Raises ValueError when samples do not divide into updates, or updates into shards.
    """
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
    # A chunk is a group: samples on different ranks could not share their prompt.
    keeps_chunks = strategy.shares_prompts
    updates = [range(start, start + global_batch_size) for start in range(0, len(meta), global_batch_size)]
    by_home = _by_update(homes, updates) if homes else [None] * len(updates)
    return [
        _deal_update(meta, lengths, positions, num_shards, at_home, keeps_chunks)
        for positions, at_home in zip(updates, by_home, strict=True)
    ]


def _by_update(homes: list[list[int]], updates: Sequence[range]) -> RowsByRank:
    """Divide each rank's rows by update; updates follow each other and have equal sizes."""
    of_updates: RowsByRank = [[[] for _ in homes] for _ in updates]
    for rank, home in enumerate(homes):
        for row in home:
            of_updates[row // len(updates[0])][rank].append(row)
    return of_updates


def _deal_update(
    meta: KVBatchMeta,
    lengths: Sequence[int],
    positions: range,
    num_shards: int,
    by_home: list[list[int]] | None,
    keeps_chunks: bool,
) -> list[list[int]]:
    """Deal one update's samples to the ranks; the samples of a chunk stay together where that is balanced.

    A placement is balanced when all ranks have the same number of rows and no rank has more than
    ``_CHUNK_SLACK`` times an equal share of the tokens. The first rule that applies is taken:

    1. ``by_home``, for which the chunks of the whole batch were dealt, if it is balanced. That helps when an
       update has a few rows of every chunk.
    2. The chunks of this update alone are dealt, if that is balanced, or if ``keeps_chunks``. That helps when
       an update has all rows of a few chunks.
    3. Single rows are dealt.
    """
    # No placement can do better than equal shares.
    enough = _CHUNK_SLACK * sum([lengths[position] for position in positions]) / num_shards
    if by_home and _is_even(by_home, lengths, enough):
        return by_home
    is_whole = len(positions) == len(meta)
    by_chunk = by_home if is_whole else _whole_chunks(meta, lengths, positions, num_shards)
    if by_chunk and (keeps_chunks or _is_even(by_chunk, lengths, enough)):
        return by_chunk
    single = _deal([lengths[position] for position in positions], num_shards)
    return [[positions[index] for index in rank] for rank in single]


def _whole_chunks(
    meta: KVBatchMeta, lengths: Sequence[int], positions: range, num_shards: int
) -> list[list[int]] | None:
    """Deal the positions to the ranks chunk by chunk; return None where ``deal_chunks`` does."""
    chunks: dict[int, list[int]] = {}
    chunk_of = meta.rows
    for position in positions:
        chunk = chunk_of[position][0]
        if chunk in chunks:
            chunks[chunk].append(position)
        else:
            chunks[chunk] = [position]
    groups = list(chunks.values())
    weights = [sum([lengths[position] for position in group]) for group in groups]
    homes = deal_chunks(weights, [len(group) for group in groups], num_shards)
    return homes and [sorted(chain.from_iterable([groups[index] for index in home])) for home in homes]


def deal_chunks(tokens: Sequence[int], num_rows: Sequence[int], num_shards: int) -> list[list[int]] | None:
    """Deal whole chunks to the ranks and return each rank's chunk indices, ascending.

    A chunk is a block of rows that were stored together. Returns None, for samples to be dealt one by one,
    unless all chunks have the same number of rows and their number is a multiple of ``num_shards``.
    """
    if len(set(num_rows)) != 1 or len(num_rows) % num_shards:
        return None
    return _deal(tokens, num_shards)


def _deal(weight: Sequence[int], num_shards: int) -> list[list[int]]:
    """Deal items to the ranks in rounds, heaviest items first; each rank gets one item per round.

    In a round the heaviest item goes to the rank with the fewest tokens, the next to the rank with the
    second fewest, and so on. Two ranks' loads then never differ by more than the heaviest item differs from
    the lightest. Returns each rank's item indices, ascending.
    """
    order = longest_first(weight)
    ranks: list[list[int]] = [[] for _ in range(num_shards)]
    load = [0] * num_shards
    for start in range(0, len(order), num_shards):
        emptiest = sorted(range(num_shards), key=load.__getitem__)
        for rank, index in zip(emptiest, order[start : start + num_shards], strict=True):
            ranks[rank].append(index)
            load[rank] += weight[index]
    return [sorted(items) for items in ranks]


def _is_even(ranks: list[list[int]], lengths: Sequence[int], max_tokens: float) -> bool:
    """Return whether all ranks have the same number of rows and no rank has more than ``max_tokens``."""
    if len({len(rows) for rows in ranks}) != 1:
        return False
    return max(sum([lengths[position] for position in rows]) for rows in ranks) <= max_tokens


def _without_idle(ranks: list[list[int]], is_idle: Sequence[bool], order: Sequence[int]) -> list[list[int]]:
    """Return one update's rows by rank, without idle rows; every rank leaves out the same number.

    The idle rows with the lowest ``order`` are left out first; every rank keeps at least one row.
    """
    idle = [sorted((row for row in rows if is_idle[row]), key=order.__getitem__) for rows in ranks]
    count = min(min(len(of_rank), len(rows) - 1) for of_rank, rows in zip(idle, ranks, strict=True))
    dropped = {row for of_rank in idle for row in of_rank[:count]}
    return [[row for row in rows if row not in dropped] for rows in ranks]


def _assemble(
    meta: KVBatchMeta,
    counted: RowsByRank,
    scheduled: RowsByRank,
    strategy: MicroBatching,
    *,
    with_ends: bool = False,
) -> tuple[KVBatchMeta, ...]:
    """Build the shards, each with a schedule of one entry per entry of ``counted``.

    An entry's global counts are over its ``counted`` rows on all ranks; its micro-batches hold the
    ``scheduled`` rows among them. A shard's samples are in the order of storage, so that whole chunks move in
    one piece.
    """
    num_shards = len(counted[0])
    shards = [
        sorted(chain.from_iterable([update[rank] for update in counted]), key=meta.rows.__getitem__)
        for rank in range(num_shards)
    ]
    where = [dict(zip(rows, range(len(rows)), strict=True)) for rows in shards]
    lengths = meta.lengths if with_ends else [model_length(length) for length in meta.lengths]
    valid, tokens = meta.tag(SAMPLE_MASK), meta.tag(NUM_RESPONSE_TOKENS)
    shares = strategy.shares_prompts
    prompts = list(map(Prompt, meta.tag(GROUP_ID), meta.tag(NUM_PROMPT_TOKENS))) if shares else None
    batches: list[list[GlobalBatch]] = [[] for _ in range(num_shards)]
    for everyone, ranks in zip(counted, scheduled, strict=True):
        micro_batches = strategy.micro_batches(
            [[lengths[row] for row in rows] for rows in ranks],
            [[prompts[row] for row in rows] for rows in ranks] if prompts else (),
        )
        rows_of_all = [row for rows in everyone for row in rows if valid[row]]
        num_tokens = sum([tokens[row] for row in rows_of_all])
        for rank, rows in enumerate(ranks):
            positions = [where[rank][row] for row in rows]
            placed = tuple(
                [
                    MicroBatch(tuple([positions[index] for index in indices]), padded_length, shared)
                    for indices, padded_length, shared in micro_batches[rank]
                ]
            )
            batches[rank].append(GlobalBatch(len(rows_of_all), num_tokens, placed))
    return tuple(
        meta.subset(rows).with_schedule(
            Schedule(tuple(batches[rank]), strategy.layout, strategy.length_multiple, with_ends)
        )
        for rank, rows in enumerate(shards)
    )


def by_generation(num_prompts: int, num_generations: int, kept_together: int = 1) -> list[int]:
    """Return the order that sorts a batch by (generation, prompt) which is sorted by (prompt, generation).

    Entry i is the old position of the sample at the new position i. ``kept_together`` generations of a
    prompt stay neighbours. Updates then take a few samples of many prompts, which makes the gradient less
    noisy than all samples of a few prompts do.
    """
    return [
        prompt * num_generations + generation
        for first in range(0, num_generations, kept_together)
        for prompt in range(num_prompts)
        for generation in range(first, min(first + kept_together, num_generations))
    ]
