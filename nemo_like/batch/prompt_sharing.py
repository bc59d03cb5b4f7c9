"""Micro-batches that hold each prompt once for all its samples. Standard library only.

    [prompt 1][prompt 2]  [after 1][after 1][after 1]  [after 2][after 2]  [unused]

A group of G samples then enters the model as one prompt and G responses instead of G prompts and G
responses. What follows the prompt in a sample attends to that prompt and to itself, so every output is what
it would be without sharing (as in Prefix Grouper, arXiv 2506.05433).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nemo_like.batch.meta import MicroBatch, MicroBatchLayout, PromptRun
from nemo_like.batch.micro_batches import Lengths, Prompt, Prompts, pack, round_up, split_to


@dataclass(frozen=True, slots=True)
class PromptSharing:
    """A strategy that packs whole groups into few micro-batches of at most ``max_tokens``, each prompt once.

    Every rank gets equally many micro-batches. A group is divided only when it is over the budget by itself,
    or when its rank would otherwise have fewer micro-batches than another rank.
    """

    max_tokens: int
    length_multiple: int = 1  # micro-batches have lengths that are multiples of this

    @property
    def layout(self) -> MicroBatchLayout:
        return MicroBatchLayout.shared

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
                    tuple([index for part in parts for index in part.indices]),
                    round_up(tokens, self.length_multiple),
                    tuple([PromptRun(len(part.indices), part.prompt_tokens) for part in parts]),
                )
                for parts, tokens in zip(bins, needed, strict=True)
            ]
            for bins in ranks
        ]

    def _bins(self, lengths: Sequence[int], prompts: Sequence[Prompt]) -> list[list[_Part]]:
        capacity = self.max_tokens // self.length_multiple * self.length_multiple
        groups: dict[Prompt, list[int]] = {}
        for index, prompt in enumerate(prompts):
            groups.setdefault(prompt, []).append(index)
        parts = [
            part
            for prompt, indices in groups.items()
            for part in _Part.of_group(prompt, indices, lengths, capacity)
        ]
        return [
            [parts[place] for place in places]
            for places in pack([part.num_tokens for part in parts], capacity)
        ]


class _Part(NamedTuple):
    """The samples of one prompt that are in one micro-batch."""

    indices: list[int]
    after: list[int]  # for each sample, how many of its tokens that enter the model follow the prompt
    prompt_tokens: int

    @classmethod
    def of_group(
        cls, prompt: Prompt, indices: list[int], lengths: Sequence[int], capacity: int
    ) -> Iterator[_Part]:
        """Yield a group as one part, or as several where one would be over the capacity.

        Raises ValueError when one sample alone is over the capacity.
        """
        # ``lengths`` leave out a sample's last token, which does not enter the model: a sample without a
        # response is thus one token shorter than its prompt.
        after = [max(0, lengths[index] - prompt.num_tokens) for index in indices]
        if prompt.num_tokens + max(after) > capacity:
            needed = prompt.num_tokens + max(after)
            raise ValueError(
                f"a sample of {needed} tokens is over the micro-batch's budget of {capacity} tokens; "
                f"raise the budget to at least {needed}"
            )
        start, room = 0, capacity - prompt.num_tokens
        for place, size in enumerate(after):
            if size > room:
                yield cls(indices[start:place], after[start:place], prompt.num_tokens)
                start, room = place, capacity - prompt.num_tokens
            room -= size
        yield cls(indices[start:], after[start:], prompt.num_tokens)

    @property
    def num_tokens(self) -> int:
        return self.prompt_tokens + sum(self.after)

    def halves(self) -> tuple[_Part, _Part]:
        """Divide the samples into two parts, each with the prompt."""
        middle = len(self.indices) // 2
        return (
            _Part(self.indices[:middle], self.after[:middle], self.prompt_tokens),
            _Part(self.indices[middle:], self.after[middle:], self.prompt_tokens),
        )


def _num_tokens(parts: Sequence[_Part]) -> int:
    return sum([part.num_tokens for part in parts])


def _split_to(count: int, bins: list[list[_Part]]) -> list[list[_Part]]:
    """Split bins until there are ``count``; a group is divided only where it is alone in its bin."""

    def halves(parts: list[_Part]) -> tuple[list[_Part], list[_Part]]:
        if len(parts) == 1:
            parts = [*parts[0].halves()]
        middle = len(parts) // 2
        return parts[:middle], parts[middle:]

    def num_samples(parts: list[_Part]) -> int:
        return sum([len(part.indices) for part in parts])

    return split_to(count, bins, weight=_num_tokens, num_samples=num_samples, halves=halves)
