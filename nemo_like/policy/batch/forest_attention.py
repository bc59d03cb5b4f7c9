"""Causal attention in a row of tokens that is a forest (``nemo_like.batch.forest``).

Every token attends to its path, and so gets the same output as in a row of this path alone: a token that
several samples, or several calls of an agent, have in common is computed once (as in Prefix Grouper, arXiv
2506.05433, for prompts).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

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

# How many slots of paths, with padding, one call attends to, unless a path alone has more.
_SLOTS_PER_CHUNK = 16_384


@dataclass(frozen=True, slots=True)
class PaddedAttention:
    """Attention by scaled_dot_product_attention on batches of n whole paths of at most L tokens.

    Padding comes after all tokens that are read, so no mask is needed, whose memory would grow with the
    square of the paths' lengths. A token is computed on each path that it is on, and its output is read from
    the first.
    """

    chunks: tuple[Tensor, ...]  # [n, L] int64 each, slots
    output_index: Tensor  # int64, of each query the index in the flattened outputs of all chunks
    cut: CutRow | None

    @classmethod
    def of(cls, forest: Forest, num_slots: int, context: ContextRank = WHOLE_CONTEXT) -> Self:
        """Lay out a row of ``num_slots`` slots; with several context ranks, for the queries of one."""
        paths = forest.paths()
        leaves = sorted((path_tokens(paths[leaf]) for leaf in forest.leaves()), key=len)
        chunks = [pad_sequence(chunk, batch_first=True, padding_value=num_slots) for chunk in _chunks(leaves)]
        places = torch.cat([chunk.flatten() for chunk in chunks])
        first = torch.full((num_slots + 1,), len(places) - 1)
        first.scatter_reduce_(0, places, torch.arange(len(places)), "amin")
        cut = CutRow.of(num_slots, context)
        return cls(
            chunks=tuple(chunk.masked_fill_(chunk == num_slots, 0) for chunk in chunks),
            output_index=first[:num_slots] if cut is None else first[cut.own],
            cut=cut,
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
        """Compute the attention of a row. query: [T, heads, d]; key: [T, groups, d]; value: [T, groups, v].

        With several context ranks the queries are those of one, and keys and values those of all, rank by
        rank. With ``window`` a token attends to that many of the latest tokens of its path. Each of
        ``sinks``, [heads], is a logit that takes a share of its head's attention. Returns [T, heads, v], with
        arbitrary values in unused slots.
        """
        if self.cut is not None:
            query, key, value = self.cut.whole(query), self.cut.by_slot(key), self.cut.by_slot(value)
        outputs = [
            _causal(_picked(query, slots), _picked(key, slots), _picked(value, slots), scale, window, sinks)
            for slots in self.chunks
        ]
        return torch.cat([one.transpose(1, 2).flatten(0, 1) for one in outputs]).index_select(
            0, self.output_index
        )


@dataclass(frozen=True, slots=True)
class VarlenAttention:
    """Attention on a GPU in half precision, by one call of PyTorch's variable-length FlashAttention, without
    padding or mask: the queries of each run, with the keys of its path."""

    num_used: int  # queries
    sequences: Sequences
    seen: Tensor  # int64, where the keys of each run are among the row's, run by run

    @classmethod
    def of(cls, forest: Forest, num_slots: int, context: ContextRank = WHOLE_CONTEXT) -> Self:
        """Lay out a row of ``num_slots`` slots; with several context ranks, for the queries of one, which
        begin and end within runs."""
        cut = CutRow.of(num_slots, context)
        own = [PathPiece(0, num_slots)] if cut is None else cut.pieces
        paths = forest.paths()
        parts = [
            (
                max(piece.start, path[-1].start),
                [*path[:-1], PathPiece(path[-1].start, min(piece.stop, path[-1].stop))],
            )
            for piece in own
            for path in paths
            if path[-1].start < piece.stop and path[-1].stop > piece.start
        ]
        if not parts:  # a rank without tokens computes too, since the ranks exchange gradients
            parts = [(own[0].start, [PathPiece(own[0].start, own[0].start + 1)])]
        num_queries = [path[-1].stop - start for start, path in parts]
        seen = [path_tokens(path) for _, path in parts]
        slots = torch.cat(seen)
        return cls(
            num_used=sum(num_queries),
            sequences=Sequences.of(torch.tensor(num_queries), torch.tensor([len(keys) for keys in seen])),
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

    def by_slot(self, tensor: Tensor) -> Tensor:
        """Return what all ranks have, [T, ...] rank by rank, in the order of slots."""
        return tensor.index_select(0, self.places)

    def whole(self, tensor: Tensor) -> Tensor:
        """Return what this rank has, [T / ranks, ...], in its slots of a row that is 0 elsewhere."""
        row = tensor.new_zeros(len(self.places), *tensor.shape[1:])
        return row.index_copy(0, self.own, tensor)


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


def _chunks(paths: Sequence[Tensor]) -> list[list[Tensor]]:
    """Divide paths, the shortest first, into chunks of bounded size."""
    chunks: list[list[Tensor]] = [[]]
    for path in paths:
        if chunks[-1] and (len(chunks[-1]) + 1) * len(path) > _SLOTS_PER_CHUNK:
            chunks.append([])
        chunks[-1].append(path)
    return chunks


def _picked(tensor: Tensor, slots: Tensor) -> Tensor:
    """Select slots [n, L] of a row's tensor [T, heads, d]; return [n, heads, L, d]."""
    return tensor.index_select(0, slots.flatten()).unflatten(0, slots.shape).transpose(1, 2)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None, sinks: Tensor | None
) -> Tensor:
    if window is not None and window >= query.shape[2]:
        window = None
    if window is not None or sinks is not None:
        return attend_masked(query, key, value, scale, window, sinks)
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=True
    )
