"""The driver's requests to a rollout and their results: prompts by index, never their text.

The seeds of the responses follow from the run's seed, the step and the prompts' positions in it.
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
    """The purpose of a rollout, which decides the dataset of its prompts."""

    training = "training"
    validation = "validation"

    @property
    def stage(self) -> Stage:
        """The stage whose deadline a rollout of this mode has."""
        return Stage.generation if self is RolloutMode.training else Stage.validation


# The report of every source, in the order of the configuration.
SourceReports = Mapping[RolloutMode, tuple[SourceReport, ...]]


@dataclass(frozen=True, slots=True)
class RolloutParts:
    """The data that a rollout actor found at its start, and the columns that each part of a rollout
    writes."""

    sources: SourceReports
    declarations: tuple[Declaration, ...]


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """The prompts of a rollout, as indices into the mode's dataset.

    ``step`` and the number of each group enter the sampling seeds. Every token must be sampled by weights of
    a version from ``policy_version``, which the engines have when the rollout begins, to ``newest_version``,
    with which training on the samples begins.
    """

    mode: RolloutMode
    step: int
    policy_version: int
    indices: tuple[int, ...]
    num_generations: int
    first_group: int = 0  # number of the first prompt's group within the step; refills count on
    num_steps_ahead: int = 0  # training steps between the rollout's begin and its own step

    @property
    def newest_version(self) -> int:
        """The version of the weights when the rollout's own step begins to train: each step before it
        increases the version by one."""
        return self.policy_version + self.num_steps_ahead

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def name(self) -> str:
        """The unique name of the rollout: "training/12/0" is the rollout of step 12 from group 0 on."""
        return f"{self.mode.name}/{self.step}/{self.first_group}"


@dataclass(frozen=True, slots=True)
class WantedGroups:
    """The groups that the next part of a rollout shall have: the groups at ``positions`` among its prompts,
    or, without positions, all ended groups once there are ``at_least`` of them."""

    at_least: int
    positions: tuple[int, ...] = ()

    def num_ended(self, num_taken: int, num_groups: int) -> int:
        """Return how many groups of a rollout must have ended when no positions are given and earlier parts
        had ``num_taken`` groups."""
        return min(num_taken + self.at_least, num_groups)


def newest_under_way(step: int, max_staleness: int, settles_after: Callable[[int], bool]) -> int:
    """Return the last step whose rollout may be under way while ``step`` trains: ``max_staleness`` steps
    later, or the first step from ``step`` on for which ``settles_after`` says that no later rollout may be
    under way."""
    last = step + max_staleness
    return next((one for one in range(step, last) if settles_after(one)), last)


@dataclass(frozen=True, slots=True)
class PromptOrigin:
    """Where a prompt is from: its source, and its index there, from 0, among the prompts that are short
    enough."""

    source: str
    index: int


def prompt_origin(index: int, sources: Sequence[SourceReport]) -> PromptOrigin:
    """Return where prompt ``index`` of a dataset is from; the dataset has these sources one after the other.

    Raises IndexError for an index beyond the last source.
    """
    start = 0
    for source in sources:
        if index < start + source.num_prompts:
            return PromptOrigin(source.name, index - start)
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
    """One part of a rollout; ``batch`` has the tags of ``flatten``, and its samples by (prompt, generation).
    Numbers that describe the whole rollout come with its last part."""

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

    torch's generators on CPUs use the last 32 bits of a seed, which are consecutive too. Two groups get
    disjoint seeds but for hash collisions: among P groups, one happens with a probability of about P**2 *
    num_generations / 2**63 on GPUs, and at most P**2 * num_generations / 2**32 on CPUs.
    """
    first = _hashed(f"{run_seed}/{mode.name}/{step}/{position}") // num_generations * num_generations
    return tuple(range(first, first + num_generations))


def turn_seed(first_turn_seed: int, turn: int) -> int:
    """Derive the seed of a sample's response in a later turn from the seed of its first; turns count from
    1."""
    return _hashed(f"{first_turn_seed}/{turn}")


def piece_seed(first_turn_seed: int, turn: int, num_tokens: int) -> int:
    """Derive the seed that continues a sample's response in ``turn`` after ``num_tokens`` tokens."""
    return _hashed(f"{first_turn_seed}/{turn}/{num_tokens}")


def _hashed(text: str) -> int:
    """Hash a text to an integer below 2**62."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
