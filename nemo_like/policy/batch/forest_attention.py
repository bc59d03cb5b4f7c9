"""Causal attention in a row of tokens that is a forest (``nemo_like.batch.forest``).

Every token attends to its path, and so gets the same output as in a row of this path alone: a token that
several samples, or several calls of an agent, have in common is computed once (as in Prefix Grouper, arXiv
2506.05433, for prompts).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from nemo_like.batch.forest import Forest, PathPiece
from nemo_like.policy.backends.devices import on_device
from nemo_like.policy.backends.masked_attention import attend_masked
from nemo_like.policy.backends.varlen import Sequences, attend_varlen, has_varlen_kernel
from nemo_like.policy.batch.context_parts import WHOLE_CONTEXT, ContextRank, context_positions
from nemo_like.policy.batch.token_runs import path_tokens

# One call attends to at most so many keys, with padding, unless a path alone has more.
_KEYS_PER_CALL = 16_384
# A mask has at most so many queries, so that it grows with the length of a path and not with its square.
_QUERIES_PER_MASK = 512
# A call takes as long as so many pairs of a query and a key.
_PAIRS_OF_A_CALL = 16_384


class QueryPart(NamedTuple):
    """Queries that follow one another in a run, and the keys of their path.

    The last query attends to all keys, the query before it to all but the last, and so on.
    """

    first: int  # among the queries of a rank
    num_queries: int
    keys: Tensor  # int64, slots of the row

    @property
    def num_earlier(self) -> int:
        """How many keys are before that of the first query."""
        return len(self.keys) - self.num_queries


@dataclass(frozen=True, slots=True)
class PaddedCall:
    """Parts whose attention one call computes, with padding behind their queries and keys."""

    queries: Tensor  # [n, Q] int64, among the queries of a rank
    keys: Tensor  # [n, K] int64, among the keys of all ranks
    num_earlier: Tensor  # [n] int64, or [1] where it is the same number for all parts
    is_causal: bool  # whether no part has earlier keys, so that a kernel needs no mask

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Compute the attention of these parts, as ``PaddedAttention.attend`` does; [n x Q, heads, v]."""
        query, key, value = _picked(query, self.queries), _picked(key, self.keys), _picked(value, self.keys)
        if window is not None and window >= key.shape[2]:
            window = None
        if self.is_causal and window is None and sinks is None:
            context = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
        else:
            context = attend_masked(query, key, value, scale, window, sinks, self.num_earlier)
        return context.transpose(1, 2).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class PaddedAttention:
    """Attention by scaled_dot_product_attention, of several parts in each call.

    The first run of a tree needs no mask. Later ones have masks of bounded size.
    """

    calls: tuple[PaddedCall, ...]
    output_index: Tensor  # int64, of each query the index in the outputs of all calls, end to end

    @classmethod
    def of(cls, forest: Forest, num_slots: int, context: ContextRank = WHOLE_CONTEXT) -> Self:
        """Lay out a row of ``num_slots`` slots; with several context ranks, for the queries of one."""
        cut = CutRow.of(num_slots, context)
        num_queries = num_slots if cut is None else len(cut.own)
        calls, computed = [], []
        for parts in _calls(
            [short for part in query_parts(forest, num_slots, cut) for short in _short(part)]
        ):
            queries = [torch.arange(part.first, part.first + part.num_queries) for part in parts]
            keys = [part.keys if cut is None else cut.places[part.keys] for part in parts]
            earlier = torch.tensor([part.num_earlier for part in parts])
            padded = pad_sequence(queries, batch_first=True, padding_value=num_queries)
            computed.append(padded.flatten())
            calls.append(
                PaddedCall(
                    queries=padded.clamp(max=num_queries - 1),
                    keys=pad_sequence(keys, batch_first=True),
                    num_earlier=earlier[:1] if len(earlier.unique()) == 1 else earlier,
                    is_causal=not earlier.any(),
                )
            )
        output_index = torch.zeros(num_queries + 1, dtype=torch.int64)
        output_index[torch.cat(computed)] = torch.arange(sum(map(len, computed)))
        return cls(tuple(calls), output_index[:num_queries])

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of a row. query: [T, heads, d]; key: [T, groups, d]; value: [T, groups, v].

        With several context ranks the queries are those of one, and keys and values those of all, rank by
        rank. With ``window`` a token attends to that many of the latest tokens of its path. Each of
        ``sinks``, [heads], is a logit that takes a share of its head's attention. Returns [T, heads, v], with
        arbitrary values in unused slots.
        """
        outputs = [call.attend(query, key, value, scale, window, sinks) for call in self.calls]
        return torch.cat(outputs).index_select(0, self.output_index)


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """Attention on a GPU in half precision, by one call of PyTorch's variable-length FlashAttention, without
    padding or mask."""

    num_used: int  # queries
    sequences: Sequences
    seen: Tensor  # int64, where the keys of each part are among those of all ranks, part by part

    @classmethod
    def of(cls, forest: Forest, num_slots: int, context: ContextRank = WHOLE_CONTEXT) -> Self:
        """Lay out a row of ``num_slots`` slots; with several context ranks, for the queries of one."""
        cut = CutRow.of(num_slots, context)
        parts = query_parts(forest, num_slots, cut)
        num_queries = [part.num_queries for part in parts]
        slots = torch.cat([part.keys for part in parts])
        return cls(
            num_used=sum(num_queries),
            sequences=Sequences.of(
                torch.tensor(num_queries), torch.tensor([len(part.keys) for part in parts])
            ),
            seen=slots if cut is None else cut.places[slots],
        )

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of a row, as ``PaddedAttention.attend`` does."""
        keys, values = (tensor.index_select(0, self.seen) for tensor in (key, value))
        used = attend_varlen(query[: self.num_used], keys, values, self.sequences, scale, window, sinks)
        return functional.pad(used, (0, 0, 0, 0, 0, len(query) - self.num_used))


@dataclass(frozen=True, slots=True)
class CutRow:
    """A row that context-parallel ranks divide: one rank's slots, and where all ranks' slots are when the
    ranks' parts lie one after the other."""

    own: Tensor  # int64, slots of this rank
    places: Tensor  # [T] int64, of each slot

    @classmethod
    def of(cls, num_slots: int, context: ContextRank) -> Self | None:
        """Divide a row; None for one rank, which has it whole."""
        if context.size == 1:
            return None
        parts = [context_positions(num_slots, rank, context.size) for rank in range(context.size)]
        return cls(own=parts[context.rank], places=torch.cat(parts).argsort())

    @property
    def pieces(self) -> list[PathPiece]:
        """The two pieces of the row that this rank has."""
        half = len(self.own) // 2
        return [PathPiece(int(part[0]), int(part[-1]) + 1) for part in self.own.split(half)]


class ForestAttention:
    """Attention in a row of ``num_slots`` slots, on any device; with several context ranks for the queries of
    one.

    A model's first layer lays it out for all layers.
    """

    def __init__(self, forest: Forest, num_slots: int, context: ContextRank = WHOLE_CONTEXT) -> None:
        self._row = forest, num_slots, context
        self._layout: PaddedAttention | VarlenAttention | None = None

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float | None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Compute the attention of the row, as ``PaddedAttention.attend`` does."""
        if self._layout is None:
            kind = VarlenAttention if has_varlen_kernel(query) else PaddedAttention
            self._layout = on_device(kind.of(*self._row), query.device)
        return self._layout.attend(query, key, value, scale, window, sinks)


def query_parts(forest: Forest, num_slots: int, cut: CutRow | None) -> list[QueryPart]:
    """Divide the used slots of a row of ``num_slots``, or those of a context rank, into parts of runs."""
    own = [PathPiece(0, num_slots)] if cut is None else cut.pieces
    paths = forest.paths()
    found: list[QueryPart] = []
    for piece in own:
        for *before, run in paths:
            start, stop = max(piece.start, run.start), min(piece.stop, run.stop)
            if start < stop:
                first = found[-1].first + found[-1].num_queries if found else 0
                keys = path_tokens([*before, PathPiece(run.start, stop)])
                found.append(QueryPart(first, stop - start, keys))
    # A rank without tokens computes too, since the ranks exchange gradients.
    return found or [QueryPart(0, 1, torch.tensor([own[0].start]))]


def _short(part: QueryPart) -> Iterator[QueryPart]:
    """Divide a part that needs a mask into some with few queries."""
    if part.num_earlier == 0:
        yield part
        return
    for begin in range(0, part.num_queries, _QUERIES_PER_MASK):
        count = min(_QUERIES_PER_MASK, part.num_queries - begin)
        yield QueryPart(part.first + begin, count, part.keys[: part.num_earlier + begin + count])


def _calls(parts: Sequence[QueryPart]) -> list[list[QueryPart]]:
    """Distribute parts over calls: parts that are much alike go together."""
    calls: list[list[QueryPart]] = []
    size = _CallSize()
    for part in sorted(parts, key=lambda part: (part.num_earlier, part.num_queries)):
        is_masked = part.num_earlier > 0
        grown = size.with_part(part)
        if not calls or not grown.is_worth_it or (is_masked and calls[-1][0].num_earlier == 0):
            calls.append([])
            grown = _CallSize().with_part(part)
        calls[-1].append(part)
        size = grown
    return calls


class _CallSize(NamedTuple):
    """What a call computes: its parts, the most keys and the most queries of one, and the pairs of a query
    and a key that are not padding."""

    num_parts: int = 0
    num_keys: int = 0
    num_queries: int = 0
    num_pairs: int = 0

    def with_part(self, part: QueryPart) -> _CallSize:
        return _CallSize(
            self.num_parts + 1,
            max(self.num_keys, len(part.keys)),
            max(self.num_queries, part.num_queries),
            self.num_pairs + part.num_queries * len(part.keys),
        )

    @property
    def is_worth_it(self) -> bool:
        """Whether one call has few keys, and less padding than what a second call would take."""
        keys = self.num_parts * self.num_keys
        return keys <= _KEYS_PER_CALL and keys * self.num_queries - self.num_pairs <= _PAIRS_OF_A_CALL


def _picked(tensor: Tensor, slots: Tensor) -> Tensor:
    """Select slots [n, L] of a row's tensor [T, heads, d]; return [n, heads, L, d]."""
    return tensor.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)
