"""What the driver asks of a rollout and what it gets back: prompts by index, never their text.

The seeds with which responses are sampled follow from the same numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from nemo_like.batch.columns import Declaration
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.cluster.stage import Stage
from nemo_like.data.interface import SourceReport
from nemo_like.data_plane.operations import Operation
from nemo_like.environments.interface import Failure
from nemo_like.observability.metrics import Metric


class RolloutMode(Enum):
    """What a rollout is for, and with it the dataset that its prompts are from."""

    training = "training"
    validation = "validation"

    @property
    def stage(self) -> Stage:
        """The stage whose deadline such a rollout has."""
        return Stage.generation if self is RolloutMode.training else Stage.validation


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

    ``step`` and the number of each group enter the sampling seeds. Every token must be sampled by the weights
    of a version from ``policy_version``, which the engines have when the rollout begins, to
    ``newest_version``, with which training begins on the samples.
    """

    mode: RolloutMode
    step: int
    policy_version: int
    indices: tuple[int, ...]
    num_generations: int
    first_group: int = 0  # number of the first prompt's group within the step; refills count on
    num_steps_ahead: int = 0  # training steps that come between the begin of the rollout and its own

    @property
    def newest_version(self) -> int:
        """The version of the weights when the rollout's own step begins to train: each step before it counts
        the version up by one."""
        return self.policy_version + self.num_steps_ahead

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def name(self) -> str:
        """What tells the rollout from others: "training/12/0" is that of step 12 from group 0 on."""
        return f"{self.mode.name}/{self.step}/{self.first_group}"


@dataclass(frozen=True, slots=True)
class WantedGroups:
    """Which groups the next part of a rollout is to have: those at ``positions`` among its prompts, or, where
    none are named, all that have ended when they are ``at_least`` so many."""

    at_least: int
    positions: tuple[int, ...] = ()

    def num_ended(self, num_taken: int, num_groups: int) -> int:
        """Return how many groups of a rollout must have ended, where none are named and the parts before had
        ``num_taken``."""
        return min(num_taken + self.at_least, num_groups)


def newest_under_way(step: int, max_staleness: int, settles_after: Callable[[int], bool]) -> int:
    """Return the last step whose rollout may be under way while ``step`` trains: ``max_staleness`` steps
    later, or an earlier one, where ``settles_after`` says that nothing may be under way after it."""
    last = step + max_staleness
    return next((one for one in range(step, last) if settles_after(one)), last)


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
    """What a rollout returns, whole or in parts; ``batch`` has ``flatten``'s tags, and rows by (prompt,
    generation). What is of the whole rollout comes with its last part."""

    batch: KVBatchMeta
    metrics: Mapping[str, Metric]
    generation_s: float  # of the whole: from the first request to the last finished group
    reward_s: float  # of the whole: from there to the last reward
    put_s: float  # flattening and the put
    operations: Sequence[Operation]  # the rollout actor's in the data plane
    failed: Sequence[FailedReward] = ()  # the first of every kind in every environment
    measured: Mapping[str, Metric] = field(default_factory=dict)  # of the whole, for the tripwires
    engines: Mapping[str, Metric] = field(default_factory=dict)  # how busy they were until the whole's end
    is_last: bool = True  # whether no part follows


def response_seeds(
    run_seed: int, mode: RolloutMode, step: int, position: int, num_generations: int
) -> tuple[int, ...]:
    """Return consecutive seeds of about 62 bits, for the first responses to the prompt at ``position``.

    torch's generators on CPUs take the last 32 bits of a seed, which are consecutive too. Two groups get
    disjoint seeds but for hash collisions: among P groups, one happens with a probability of about
    P**2 * num_generations / 2**63 on GPUs, and at most P**2 * num_generations / 2**32 on CPUs.
    """
    first = _hashed(f"{run_seed}/{mode.name}/{step}/{position}") // num_generations * num_generations
    return tuple(range(first, first + num_generations))


def turn_seed(first_turn_seed: int, turn: int) -> int:
    """Derive the seed of a sample's response in a later turn from that of its first; turns count from 1."""
    return _hashed(f"{first_turn_seed}/{turn}")


def piece_seed(first_turn_seed: int, turn: int, num_tokens: int) -> int:
    """Derive the seed with which a sample's response in ``turn`` is continued after ``num_tokens`` tokens."""
    return _hashed(f"{first_turn_seed}/{turn}/{num_tokens}")


def _hashed(text: str) -> int:
    """Hash a text to an integer below 2**62."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
