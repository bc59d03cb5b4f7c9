"""What the driver asks of a rollout and what it gets back: prompts by index, never their text.

The seeds with which responses are sampled follow from the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from nemo_like.batch.columns import Declaration
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data.interface import SourceReport
from nemo_like.data_plane.operations import Operation
from nemo_like.environments.interface import Failure
from nemo_like.observability.metrics import Metric


class RolloutMode(Enum):
    """What a rollout is for, and with it the dataset that its prompts are from."""

    training = "training"
    validation = "validation"


# What every source holds, in the order of the configuration.
SourceReports = Mapping[RolloutMode, tuple[SourceReport, ...]]


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What a rollout actor found at its start: the data, and the columns that its parts write."""

    sources: SourceReports
    declarations: tuple[Declaration, ...]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """The prompts of a rollout, as indices into the mode's dataset.

    ``step`` and the number of each group enter the sampling seeds. Every response must be sampled by the
    weights of ``policy_version``.
    """

    mode: RolloutMode
    step: int
    policy_version: int
    indices: tuple[int, ...]
    num_generations: int
    first_group: int = 0  # number of the first prompt's group within the step; refills count on

    def __len__(self) -> int:
        return len(self.indices)


@dataclass(frozen=True, slots=True)
class ProblemPlace:
    """Where a problem is: its source, and its number there, from 0, of those that are short enough."""

    source: str
    index: int


def problem_place(index: int, sources: Sequence[SourceReport]) -> ProblemPlace:
    """Return the place of problem ``index`` of a dataset that has these sources one after the other.

    Raises IndexError for an index beyond the last source.
    """
    start = 0
    for source in sources:
        if index < start + source.num_prompts:
            return ProblemPlace(source.name, index - start)
        start += source.num_prompts
    raise IndexError(f"no problem {index} in {len(sources)} sources of {start} together")


@dataclass(frozen=True, slots=True)
class FailedReward:
    """A sample that its environment could not judge."""

    env: str
    failure: Failure
    prompt: int  # index into the mode's dataset
    generation: int


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """What a rollout returns; ``batch`` has ``flatten``'s tags, and rows by (prompt, generation)."""

    batch: KVBatchMeta
    metrics: Mapping[str, Metric]
    generation_s: float  # from the first request to the last finished group
    reward_s: float  # from there to the last reward
    put_s: float  # flattening and the put
    operations: Sequence[Operation]  # the rollout actor's in the data plane
    failed: Sequence[FailedReward] = ()  # the first of every kind in every environment
    measured: Mapping[str, Metric] = field(default_factory=dict)  # for the tripwires


def response_seeds(
    run_seed: int, mode: RolloutMode, step: int, position: int, num_generations: int
) -> tuple[int, ...]:
    """Return consecutive seeds of about 62 bits, for the first responses to the prompt at ``position``.

    Two groups get disjoint seeds but for hash collisions: among P groups, one happens with a probability of
    about P**2 * num_generations / 2**63.
    """
    first = _hashed(f"{run_seed}/{mode.name}/{step}/{position}") // num_generations * num_generations
    return tuple(range(first, first + num_generations))


def turn_seed(first_turn_seed: int, turn: int) -> int:
    """Derive the seed of a sample's response in a later turn from that of its first; turns count from 1."""
    return _hashed(f"{first_turn_seed}/{turn}")


def _hashed(text: str) -> int:
    """Hash a text to an integer below 2**62."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
