"""Micro-batches that hold each prompt once for all its samples. Standard library only.

    [prompt 1][after][after][after]  [prompt 2][after][after]  [unused]

A group of G samples then enters the model as one prompt and G responses instead of G prompts and G
responses. The row is a forest (``nemo_like.batch.forest``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from nemo_like.batch.meta import MicroBatch, MicroBatchLayout
from nemo_like.batch.micro_batches import Lengths, Prompt, Prompts, pack, round_up, split_to


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """A strategy that packs whole groups into few micro-batches of at most ``max_tokens``, each prompt once.

    Every rank gets the same number of micro-batches. A group is divided only when it is over the budget by
    itself, or when its rank would otherwise have fewer micro-batches than another rank.
    """

    max_tokens: int
    length_multiple: int = 1  # micro-batches have lengths that are multiples of this

    @property
    def layout(self) -> MicroBatchLayout:
        return MicroBatchLayout.packed

    @property
    def shares_prompts(self) -> bool:
        return True

    def micro_batches(self, lengths: Lengths, prompts: Prompts) -> list[list[MicroBatch]]:
        """Return each rank's micro-batches, [rank][number]; rows are indices into the rank's samples.

        Raises ValueError when one sample alone is over the budget, or when a rank has fewer samples than
        another rank needs micro-batches.
        """
        ranks = [self._bins(*of_rank) for of_rank in zip(lengths, prompts, strict=True)]
        count = max(map(len, ranks))
        # Heaviest first on every rank: micro-batches that run at the same time then take about as long.
        ranks = [sorted(_split_to(count, bins), key=_num_tokens, reverse=True) for bins in ranks]
        needed = [max(map(_num_tokens, of_number)) for of_number in zip(*ranks, strict=True)]
        return [
            [
                MicroBatch(
                    tuple([index for piece in pieces for index in piece.indices]),
                    round_up(tokens, self.length_multiple),
                    tuple([shared for piece in pieces for shared in piece.shared]),
                )
                for pieces, tokens in zip(bins, needed, strict=True)
            ]
            for bins in ranks
        ]

    def _bins(self, lengths: Sequence[int], prompts: Sequence[Prompt]) -> list[list[_Piece]]:
        capacity = self.max_tokens // self.length_multiple * self.length_multiple
        groups: dict[Prompt, list[int]] = {}
        for index, prompt in enumerate(prompts):
            groups.setdefault(prompt, []).append(index)
        pieces = [
            piece
            for prompt, indices in groups.items()
            for piece in _Piece.of_group(prompt, indices, lengths, capacity)
        ]
        return [
            [pieces[position] for position in positions]
            for positions in pack([piece.num_tokens for piece in pieces], capacity)
        ]


class _Piece(NamedTuple):
    """The samples of one prompt that are in one micro-batch."""

    indices: list[int]
    lengths: list[int]  # of each sample, how many of its tokens enter the model
    prompt_tokens: int

    @classmethod
    def of_group(
        cls, prompt: Prompt, indices: list[int], lengths: Sequence[int], capacity: int
    ) -> Iterator[_Piece]:
        """Yield a group as one piece, or as several pieces where it is over the capacity.

        Raises ValueError when one sample alone is over the capacity.
        """
        whole = cls(indices, [lengths[index] for index in indices], prompt.num_tokens)
        longest = max(whole.lengths)
        if longest > capacity:
            raise ValueError(
                f"a sample of {longest} tokens is over the micro-batch's budget of {capacity} tokens; "
                f"raise the budget to at least {longest}"
            )
        start, room = 0, capacity
        for position, (length, shared) in enumerate(zip(whole.lengths, whole.shared, strict=True)):
            if length - shared > room:
                yield whole.cut(start, position)
                start, room = position, capacity - length
            else:
                room -= length - shared
        yield whole.cut(start, len(indices))

    @property
    def shared(self) -> list[int]:
        """How many tokens each sample has in common with the one before it.

        A sample without a response enters the model without the last token of its prompt.
        """
        prompt = self.prompt_tokens
        return [0, *(min(prompt, one, next_one) for one, next_one in pairwise(self.lengths))]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths) - sum(self.shared)

    def cut(self, start: int, stop: int) -> _Piece:
        """Return samples [start, stop)."""
        return _Piece(self.indices[start:stop], self.lengths[start:stop], self.prompt_tokens)

    def halves(self) -> tuple[_Piece, _Piece]:
        """Divide the samples into two pieces, each with the prompt."""
        middle = len(self.indices) // 2
        return self.cut(0, middle), self.cut(middle, len(self.indices))


def _num_tokens(pieces: Sequence[_Piece]) -> int:
    return sum([piece.num_tokens for piece in pieces])


def _split_to(count: int, bins: list[list[_Piece]]) -> list[list[_Piece]]:
    """Split bins until there are ``count``; a group is divided only where it is alone in its bin."""

    def halves(pieces: list[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
        if len(pieces) == 1:
            pieces = [*pieces[0].halves()]
        middle = len(pieces) // 2
        return pieces[:middle], pieces[middle:]

    def num_samples(pieces: list[_Piece]) -> int:
        return sum([len(piece.indices) for piece in pieces])

    return split_to(count, bins, weight=_num_tokens, num_samples=num_samples, halves=halves)
