"""Micro-batches in which the samples of one prompt hold it once. Standard library only.

    [prompt 1][prompt 2]  [after 1][after 1][after 1]  [after 2][after 2]  [unused]

A group of G samples then enters the model as one prompt and G responses instead of G of both. What is
behind a prompt attends to that prompt and to itself, so every output is what it would be without sharing
(as in Prefix Grouper, arXiv 2506.05433).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from nemo_like.data_plane.batching import Lengths, Prompt, Prompts, pack, round_up
from nemo_like.data_plane.meta import MicroBatch, MicroBatchLayout, PromptRun


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """Groups in bins of at most ``max_tokens``, each prompt counted once; few bins, and equally many on every
    rank. Only a group that is over the budget, or that a rank needs to have enough bins, is divided.

    ``micro_batches`` raises ValueError when one sample alone is over the budget, or a rank has too few
    samples to fill as many bins as another needs.
    """

    max_tokens: int
    length_multiple: int = 1  # of a bin

    @property
    def layout(self) -> MicroBatchLayout:
        return MicroBatchLayout.shared

    def micro_batches(self, lengths: Lengths, prompts: Prompts) -> list[list[MicroBatch]]:
        """[rank][number]; rows are indices into the rank's samples."""
        ranks = [_Samples(*of_rank) for of_rank in zip(lengths, prompts, strict=True)]
        bins = [self._bins(samples) for samples in ranks]
        count = max(map(len, bins))
        # Heaviest first on every rank: what runs at the same time then takes about as long.
        bins = [
            sorted(_split_to(count, of_rank, samples), key=samples.num_tokens, reverse=True)
            for of_rank, samples in zip(bins, ranks, strict=True)
        ]
        needed = [
            max(samples.num_tokens(of_rank[number]) for of_rank, samples in zip(bins, ranks, strict=True))
            for number in range(count)
        ]
        return [
            [
                MicroBatch(tuple(indices), round_up(tokens, self.length_multiple), samples.runs(indices))
                for indices, tokens in zip(of_rank, needed, strict=True)
            ]
            for of_rank, samples in zip(bins, ranks, strict=True)
        ]

    def _bins(self, samples: _Samples) -> list[list[int]]:
        capacity = self.max_tokens // self.length_multiple * self.length_multiple
        parts = list(samples.parts(capacity))
        packed = pack([samples.num_tokens(part) for part in parts], capacity)
        return [[index for place in places for index in parts[place]] for places in packed]


class _Samples:
    """One rank's."""

    def __init__(self, lengths: Sequence[int], prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        # A response's last token does not enter the model; without a response, neither does the prompt's.
        self._after = [
            max(0, length - prompt.num_tokens) for length, prompt in zip(lengths, prompts, strict=True)
        ]

    def parts(self, capacity: int) -> Iterator[list[int]]:
        """Each prompt's samples, in several parts where one would be over the capacity."""
        groups: dict[Prompt, list[int]] = {}
        for index, prompt in enumerate(self._prompts):
            groups.setdefault(prompt, []).append(index)
        for prompt, indices in groups.items():
            part: list[int] = []
            room = capacity - prompt.num_tokens
            for index in indices:
                if self._after[index] > room and part:
                    yield part
                    part, room = [], capacity - prompt.num_tokens
                if self._after[index] > room:
                    needed = prompt.num_tokens + self._after[index]
                    raise ValueError(
                        f"a sample of {needed} tokens is over the micro-batch's budget of {capacity} tokens; "
                        f"raise the budget to at least {needed}"
                    )
                part.append(index)
                room -= self._after[index]
            yield part

    def runs(self, indices: Sequence[int]) -> tuple[PromptRun, ...]:
        """Neighbours of one prompt, in the order of ``indices``."""
        by_prompt = groupby(indices, key=self._prompts.__getitem__)
        return tuple([PromptRun(len(list(run)), prompt.num_tokens) for prompt, run in by_prompt])

    def num_tokens(self, indices: Sequence[int]) -> int:
        """What these take: every run's prompt, and what is behind it in each sample."""
        prompts = sum([run.num_tokens for run in self.runs(indices)])
        return prompts + sum([self._after[index] for index in indices])


def _split_to(count: int, bins: list[list[int]], samples: _Samples) -> list[list[int]]:
    """Cut bins in two until there are ``count``, fullest first; each cut divides one group at most."""
    bins = list(bins)
    while len(bins) < count:
        splittable = [place for place, indices in enumerate(bins) if len(indices) > 1]
        if not splittable:
            raise ValueError(f"{len(bins)} samples can't fill {count} micro-batches")
        indices = bins.pop(max(splittable, key=lambda place: samples.num_tokens(bins[place])))
        middle = len(indices) // 2
        bins += [indices[:middle], indices[middle:]]
    return bins
