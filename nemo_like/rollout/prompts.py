"""Which prompts to roll out, by index: the driver never holds their text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from nemo_like.batch.columns import Declaration
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data.interface import SourceReport
from nemo_like.data_plane.operations import Operation
from nemo_like.environments.interface import Failure
from nemo_like.observability.metrics import Metric


class RolloutMode(Enum):
    """``training`` samples G responses a prompt; ``validation`` is about held-out prompts."""

    training = "training"
    validation = "validation"


# Of every source, in the order of the configuration.
SourceReports = Mapping[RolloutMode, tuple[SourceReport, ...]]


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """What a rollout actor found at its start: the data, and the columns that its parts write."""

    sources: SourceReports
    declarations: tuple[Declaration, ...]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Indices into the mode's dataset; ``step`` and the group's number enter the sampling seeds.

    Every response must be sampled by the weights of ``policy_version``.
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
class FailedReward:
    """A sample that its environment could not judge."""

    env: str
    failure: Failure
    prompt: int  # index into the mode's dataset
    generation: int


@dataclass(frozen=True, slots=True)
class RolloutResult:
    """``batch`` has one row per sample, ordered by (prompt, generation), with the tags of ``flatten``."""

    batch: KVBatchMeta
    metrics: Mapping[str, Metric]
    generation_s: float  # from the first request to the last finished group
    reward_s: float  # what the rewards took beyond that
    put_s: float  # flatten and the one-hop put
    operations: Sequence[Operation]  # in the data plane
    failed: Sequence[FailedReward] = ()  # the first of every kind in every environment


def response_seeds(
    run_seed: int, mode: RolloutMode, step: int, position: int, num_generations: int
) -> tuple[int, ...]:
    """Seeds of the first responses to the prompt at ``position`` of a step: consecutive integers below 2**62.

    Groups get disjoint ranges but for hash collisions (probability about P**2 / 2**60 per run).
    """
    first = _hashed(f"{run_seed}/{mode.name}/{step}/{position}") // num_generations * num_generations
    return tuple(range(first, first + num_generations))


def turn_seed(first_turn_seed: int, turn: int) -> int:
    """Seed of a sample's later response, from that of its first; ``turn`` counts from 1."""
    return _hashed(f"{first_turn_seed}/{turn}")


def _hashed(text: str) -> int:
    """Below 2**62."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
