"""The question to an environment, a ``Turn``, and its answer, a ``Feedback``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from nemo_like.data.interface import Observation, Prompt, TaskPrompt

# The metric env/<name>/abstained_share/<component>: the share of samples in which the component abstained.
ABSTAINED_SHARE = "abstained_share"
# The share of an agent's sessions that begin with a response which the policy never gave in them.
UNSAID_SHARE = "unsaid_share"
# The number of a turn without a number.
UNNUMBERED = -1
_TURN_BITS = 20  # the bits of a turn's number that count the turns of its conversation


def turn_number(position: int, generation: int, turn: int) -> int:
    """Return the number of a turn, which is unique within a rollout."""
    return (((position << _TURN_BITS) + generation) << _TURN_BITS) + turn


def conversation_of(number: int) -> int:
    """Return the number that all turns of a conversation share, from the number of one turn."""
    return number >> _TURN_BITS


@dataclass(frozen=True, slots=True)
class Exchange:
    """An earlier turn: the policy's response, and the environment's observation."""

    response: str
    observation: str


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """How an agent reaches the policy: the URL of an endpoint with OpenAI's API, and the key of its session.

    ``restart_key`` begins the session again; the environment that runs the agent has it, the agent has not.
    """

    base_url: str
    api_key: str
    restart_key: str


@dataclass(frozen=True, slots=True)
class Turn:
    """The question to an environment: a conversation that has just got a response."""

    prompt: Prompt
    response: str  # the latest; decoded text without the closing eos; other special tokens stay visible
    answer: str  # the dataset's reference answer
    is_truncated: bool  # the response ran into a token limit, so it has no end
    data: Mapping[str, Any] = field(default_factory=dict)  # further fields of the record
    history: tuple[Exchange, ...] = ()  # the turns before, oldest first
    is_last: bool = True  # a limit on turns or tokens lets no other turn follow
    state: Any = None  # from the feedback to the previous turn; None in the first turn
    # Token ids of the response, with a closing eos, if the environment has a column per token; else empty.
    response_ids: tuple[int, ...] = ()
    agent: AgentAccess | None = None  # for an agent's environment, which is asked before there is a response
    number: int = field(
        default=UNNUMBERED, compare=False
    )  # unique within the rollout; the feedback repeats it


def first_question(task_prompt: TaskPrompt, *, max_turns: int, response_ids: tuple[int, ...] = ()) -> Turn:
    """Return the turn that checks before a run whether an environment can judge: a prompt with its reference
    answer as the response."""
    return Turn(
        prompt=task_prompt.prompt,
        response=task_prompt.answer,
        answer=task_prompt.answer,
        is_truncated=False,
        data=task_prompt.data,
        is_last=max_turns == 1,
        response_ids=response_ids,
    )


class FailureKind(Enum):
    """Why a sample has no reward; part of metric names."""

    raised = "raised"
    timed_out = "timed_out"
    died = "died"  # the reward took its process down
    abstained = "abstained"  # all components of the reward are None
    malformed = "malformed"  # the answer is no proper feedback
    not_finite = "not_finite"  # NaN, infinite, or beyond float32
    unreachable = "unreachable"  # a remote server did not answer in time, or with an error
    flooded = "flooded"  # an agent made too many calls, asked for or printed too much
    bad_image = "bad_image"  # an image of its prompt or of an observation cannot be read


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a sample could not be judged."""

    kind: FailureKind
    reason: str


class EnvironmentCheckFailed(Exception):
    """An environment could not judge its first prompt before training; the message has the question, the
    answer and the remedy."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """The environment's answer to one turn.

    Feedback with ``is_done=False`` needs an observation. Numbers may be numpy's. The rewards of a
    conversation's turns are added up by name. A component that is None abstains: it is left out of the sum
    and of its own mean. When all abstain there is no reward, and ``feedback.checked`` makes that a failure.
    """

    rewards: Mapping[str, float | None] = field(default_factory=dict)  # components; the reward is their sum
    # For the policy's next turn: text, or a list of parts of text and images as in a record's messages.
    observation: str | Sequence[Mapping[str, Any]] | None = None
    is_done: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged as means over turns that give them
    state: Any = None  # given back with the next turn; small and picklable
    # Values by the names that ``batch.columns.writes`` declares; see docs/reference/columns.md. A column per
    # token has one for each token of this response.
    columns: Mapping[str, Any] = field(default_factory=dict)
    # For each <image> in the observation: a path, a file's bytes, a data URL or an image of Pillow. Without
    # any <image> they come before the text.
    images: Sequence[Any] = ()
    failure: Failure | None = None  # why there is no reward; such a sample must not train
    turn_number: int = field(default=UNNUMBERED, compare=False)  # of the turn; the server fills it in

    @classmethod
    def failed(cls, kind: FailureKind, reason: str) -> Feedback:
        """Return the feedback for a sample that could not be judged."""
        return cls(failure=Failure(kind, reason))

    @property
    def said(self) -> Observation:
        """The observation, of feedback that ``feedback.checked`` returned."""
        return Observation(str(self.observation or ""), tuple(self.images))

    @property
    def reward(self) -> float | None:
        """The sum of the components that do not abstain; None for a failed sample."""
        return None if self.failure is not None else total_reward(self.rewards)


def total_reward(components: Mapping[str, float | None]) -> float:
    """Return the sum of the components that do not abstain."""
    return float(sum(value for value in components.values() if value is not None))


class Environment(Protocol):
    """Judges responses, and answers them in longer conversations.

    An environment keeps nothing of a conversation between calls: ``Turn.state`` carries it, so that any
    process can answer the next turn, and a turn that failed in a batch can be asked again alone. Its class
    declares the columns of its feedback with ``batch.columns.writes``.
    """

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in the order of the turns."""
