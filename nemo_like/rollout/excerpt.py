"""Chooses the samples of a rollout that an excerpt of it has: a few whole groups, evenly spread.

The choice follows from the sizes alone, so runs of one configuration keep the same samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.rollout.conversation import Conversation
from nemo_like.rollout.options import RolloutConfig, dumps_all_of
from nemo_like.rollout.prompts import PromptBatch, RolloutMode


class KeptGroups(NamedTuple):
    """The groups of a part of a rollout that are kept, or their first samples."""

    batch: KVBatchMeta
    groups: Sequence[Sequence[Conversation]]
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Excerpt:
    """The groups of a rollout to keep, by their positions among its prompts, and how many samples of each."""

    positions: frozenset[int]
    num_generations: int

    def of(
        self, batch: KVBatchMeta, groups: Sequence[Sequence[Conversation]], positions: Sequence[int]
    ) -> KeptGroups:
        """Return the samples to keep of some groups; ``batch`` has their samples, group after group."""
        places = [place for place, position in enumerate(positions) if position in self.positions]
        starts = list(accumulate(map(len, groups), initial=0))
        kept = [groups[place][: self.num_generations] for place in places]
        rows = [
            starts[place] + i for place, group in zip(places, kept, strict=True) for i in range(len(group))
        ]
        return KeptGroups(batch.subset(rows), kept, [positions[place] for place in places])


def excerpt_of(prompts: PromptBatch, cfg: RolloutConfig) -> Excerpt:
    """Return what to keep of a rollout: everything where all samples are dumped, or the excerpt's share.

    Of a training step's rollouts only the first has a share.
    """
    everything = Excerpt(frozenset(range(len(prompts))), prompts.num_generations)
    if prompts.mode is RolloutMode.validation:
        is_whole, limit = cfg.dump_validation, cfg.excerpt_validation_samples
    else:
        is_whole, limit = dumps_all_of(prompts.step, cfg), 0 if prompts.first_group else cfg.excerpt_samples
    return everything if is_whole else spread(len(prompts), prompts.num_generations, limit)


def spread(num_groups: int, num_generations: int, max_samples: int) -> Excerpt:
    """Return evenly spread whole groups of at most ``max_samples`` samples together.

    Where not even one group fits, the first samples of the first group are kept.
    """
    if not max_samples:
        return Excerpt(frozenset(), 0)
    count = min(num_groups, max(1, max_samples // num_generations))
    positions = frozenset(number * num_groups // count for number in range(count))
    return Excerpt(positions, min(num_generations, max_samples))
