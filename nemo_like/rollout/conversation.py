"""A sample while it grows, turn by turn, in tokens.

Tokens that the policy generated are kept as the engine returned them, and never tokenised again. An
observation of the environment is tokenised once and appended. Pure: nothing here waits or calls another
process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain
from typing import Any

import numpy as np

from nemo_like.algorithms.message_flags import MessageFlag
from nemo_like.batch.columns import (
    IMAGE_GRIDS,
    MESSAGE_FLAGS,
    OBSERVED_IMAGE_GRIDS,
    OBSERVED_PIXEL_VALUES,
    PIXEL_VALUES,
)
from nemo_like.data.interface import Encoded, Message, Prompt, TaskPrompt
from nemo_like.data.messages import with_response
from nemo_like.environments.interface import (
    Exchange,
    Failure,
    FailureKind,
    Feedback,
    Turn,
    total_reward,
    turn_number,
)
from nemo_like.generation.interface import FORCED, Response

# Maps a column of prompt images to the column of the same values for images in observations.
_OBSERVED = {PIXEL_VALUES.name: OBSERVED_PIXEL_VALUES.name, IMAGE_GRIDS.name: OBSERVED_IMAGE_GRIDS.name}


class EndReason(Enum):
    """Why a conversation ended."""

    done = "done"  # the environment said so
    token_limit = "token_limit"
    turn_limit = "turn_limit"
    failed = "failed"  # the environment could not judge it: there is no reward


@dataclass(frozen=True, slots=True)
class Limits:
    """How many turns and tokens a conversation may have."""

    max_turns: int
    max_tokens: int  # prompt, responses and observations together


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive tokens of a sample from one side: the prompt, a response or an observation.

    token_ids: [L] int32; logprobs: [L] float32, nats, or None where the policy did not generate the tokens;
    forced: [L] uint8, 1 on tokens of a response that a grammar chose, which do not train, or None for none.
    ``columns`` has values that came with these tokens, by column: one value per token, or one for the whole
    sample or prompt.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray | None
    columns: dict[str, Any] = field(default_factory=dict)
    forced: np.ndarray | None = None

    @property
    def trains(self) -> np.ndarray:
        """Which tokens the policy chose, [L] uint8."""
        if self.logprobs is None or self.forced is None:
            return np.full(len(self.token_ids), self.logprobs is not None, dtype=np.uint8)
        return 1 - self.forced

    @property
    def num_chosen(self) -> int:
        """The number of tokens that the policy chose."""
        return int(self.trains.sum())


@dataclass(slots=True)
class Conversation:
    """A sample's tokens, texts and rewards so far; ``position`` and ``generation`` say where it is in the
    batch."""

    task_prompt: TaskPrompt
    prompt_ids: tuple[int, ...]
    position: int  # of its prompt in the batch
    generation: int  # within its group
    limits: Limits
    seed: int  # of the first response; later ones derive theirs
    prompt_images: tuple[bytes, ...] = ()  # files
    prompt_columns: dict[str, Any] = field(default_factory=dict)  # values that the engine gave for the prompt
    passages: list[Passage] = field(default_factory=list)  # after the prompt
    history: list[Exchange] = field(default_factory=list)  # turns that were answered
    observed_images: list[tuple[bytes, ...]] = field(default_factory=list)  # files, per turn of history
    begun: Response | None = None  # the first tokens of a response, which the next request continues
    num_continued: int = 0  # how often a request continued a response
    latest_response: str = ""
    latest_is_truncated: bool = False
    num_turns: int = 0
    rewards: dict[str, float | None] = field(default_factory=dict)  # components, summed over turns
    metric_sums: dict[str, float] = field(default_factory=dict)  # of the environment, summed over turns
    metric_counts: dict[str, float] = field(default_factory=dict)  # how many turns gave the metric
    state: Any = None  # what the environment keeps until the next turn
    flags: list[MessageFlag] = field(default_factory=list)  # of each response, where a run looks for them
    policy_version: int | None = None  # the oldest that sampled a response; None before the first
    end: EndReason | None = None
    failure: Failure | None = None
    # Of each turn, on the monotonic clock: when its response was asked for, when it came, and when the
    # environment had answered.
    moments_s: list[float] = field(default_factory=list)

    @property
    def prompt_passage(self) -> Passage:
        """The prompt's tokens, with the columns that its record brings."""
        return Passage(np.asarray(self.prompt_ids, dtype=np.int32), None, dict(self.task_prompt.columns))

    def own_prompt(self, prompt: Passage) -> Passage:
        """Return ``prompt``, which all samples of a group share, with the columns that the engine gave for
        this sample's prompt."""
        if not self.prompt_columns:
            return prompt
        return Passage(prompt.token_ids, None, {**prompt.columns, **self.prompt_columns})

    @property
    def num_known(self) -> int:
        """How many tokens from the start have the values that an engine gives for tokens that it has read.
        The engine has not read the last token that it sampled, nor any later token."""
        if self.begun is not None:
            return self.num_tokens - 1
        observed = 0  # tokens after the latest response
        for passage in reversed(self.passages):
            if passage.logprobs is not None:
                return self.num_tokens - observed - 1
            observed += len(passage.token_ids)
        return 0

    @property
    def num_tokens(self) -> int:
        passages = sum(len(passage.token_ids) for passage in self.passages)
        return len(self.prompt_ids) + passages + self.num_begun

    @property
    def num_begun(self) -> int:
        """The number of tokens of a response that the next request will continue."""
        return 0 if self.begun is None else len(self.begun.token_ids)

    @property
    def num_response_tokens(self) -> int:
        """The number of tokens that the policy chose."""
        return sum(passage.num_chosen for passage in self.passages) + self.num_begun

    @property
    def num_tokens_left(self) -> int:
        return self.limits.max_tokens - self.num_tokens

    @property
    def is_truncated(self) -> bool:
        """Whether a token limit cut the sample short."""
        return self.latest_is_truncated or self.end is EndReason.token_limit

    @property
    def reward(self) -> float | None:
        """The sum of the reward's components that do not abstain; None when the environment failed."""
        return None if self.failure is not None else total_reward(self.rewards)

    @property
    def turn_number(self) -> int:
        """A number for the latest turn that is unique within the rollout."""
        return turn_number(self.position, self.generation, self.num_turns)

    @property
    def last_token_id(self) -> int:
        return int(self.passages[-1].token_ids[-1])

    def images(self) -> tuple[bytes, ...]:
        """Return the files of all images so far: the prompt's, then each observation's."""
        return (*self.prompt_images, *chain.from_iterable(self.observed_images))

    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens so far, which the next response will continue."""
        later = (token for passage in self.passages for token in passage.token_ids.tolist())
        begun = () if self.begun is None else self.begun.token_ids.tolist()
        return (*self.prompt_ids, *later, *begun)

    def begin_response(self, piece: Response, policy_version: int) -> None:
        """Append ``piece`` to the response that is not complete yet; the next request continues it.
        ``policy_version`` is the oldest that sampled the piece."""
        self.begun = self.with_begun(piece)
        self.num_continued += 1
        self._note_version(policy_version)

    def with_begun(self, response: Response) -> Response:
        """Return ``response`` preceded by the tokens that earlier pieces brought."""
        return response if self.begun is None else self.begun.continued(response)

    def add_response(self, response: Response, text: str, policy_version: int) -> None:
        """Append the policy's whole response and begin a turn with it. ``text`` is the response decoded, and
        ``policy_version`` the oldest that sampled it.

        ``response`` includes earlier pieces; see ``with_begun``.
        """
        self.begun = None
        self._add_context(response.context_columns)
        columns = dict(response.columns)
        forced = columns.pop(FORCED, None)
        self.passages.append(Passage(response.token_ids, response.logprobs, columns, forced))
        self.latest_response, self.latest_is_truncated = text, response.is_truncated
        self._note_version(policy_version)
        self.num_turns += 1

    def flag_response(self, flags: MessageFlag, watched: MessageFlag) -> None:
        """Note what is wrong with the latest response, on each of its tokens too."""
        self.passages[-1].columns[MESSAGE_FLAGS.name] = np.full(
            len(self.passages[-1].token_ids), flags, np.uint8
        )
        self.count_flags([flags], watched)

    def count_flags(self, flags: Sequence[MessageFlag], watched: MessageFlag) -> None:
        """Count what is wrong with responses in the environment's metrics."""
        self.flags += flags
        for one in watched:
            name = f"{one.name}_share"
            _add(self.metric_sums, {name: float(sum(one in found for found in flags))})
            _add(self.metric_counts, {name: float(len(flags))})

    def withhold_reward(self, unrewarded: MessageFlag) -> None:
        """Set the reward of a conversation that has ended to 0 when one of its responses has a flag of
        ``unrewarded``; an empty answer counts at the end alone."""
        earlier = (found & ~MessageFlag.empty_answer for found in self.flags[:-1])
        if any(found & unrewarded for found in (*earlier, *self.flags[-1:])):
            self.rewards = dict.fromkeys(self.rewards, 0.0)

    def _add_context(self, columns: Mapping[str, Any]) -> None:
        """Store the values that came with a response for the tokens before it, from ``num_known`` on.

        For the first response these are the prompt's tokens; later, the last token of the previous response
        and the observation after it.
        """
        for name, values in columns.items():
            if not self.passages:
                self.prompt_columns[name] = values
                continue
            response, observation = self.passages[-2:]
            response.columns[name] = np.concatenate([response.columns[name][:-1], values[:1]])
            observation.columns[name] = values[1:]

    def fail(self, failure: Failure, policy_version: int) -> None:
        """End the conversation without a reward; ``policy_version`` is the version that samples the
        rollout."""
        self.failure, self.end = failure, EndReason.failed
        self._note_version(policy_version)

    def _note_version(self, version: int) -> None:
        self.policy_version = version if self.policy_version is None else min(self.policy_version, version)

    def turn(self, *, with_tokens: bool = False) -> Turn:
        """Return the latest response as a question to the environment, with its token ids if
        ``with_tokens``."""
        return Turn(
            prompt=self.task_prompt.prompt,
            response=self.latest_response,
            answer=self.task_prompt.answer,
            is_truncated=self.latest_is_truncated,
            data=self.task_prompt.data,
            history=tuple(self.history),
            is_last=self._is_out_of_tokens or self._is_out_of_turns,
            state=self.state,
            response_ids=tuple(self.passages[-1].token_ids.tolist()) if with_tokens else (),
            number=self.turn_number,
        )

    def add_feedback(self, feedback: Feedback) -> None:
        """Add the environment's answer to the latest response.

        Sets ``end`` when the environment is done or failed, or when a limit allows no further turn.
        """
        _add(self.metric_sums, feedback.metrics)
        _add(self.metric_counts, dict.fromkeys(feedback.metrics, 1.0))
        if feedback.failure is not None:
            self._end_unjudged(feedback.failure)
            return
        _add_rewards(self.rewards, feedback.rewards)
        self.passages[-1].columns.update(feedback.columns)
        self.state = feedback.state
        if feedback.is_done:
            self.end = EndReason.done
        elif self._is_out_of_tokens:
            self._end_at(EndReason.token_limit)
        elif self._is_out_of_turns:
            self._end_at(EndReason.turn_limit)

    def _end_unjudged(self, failure: Failure) -> None:
        """End the conversation at a turn without a reward. When the environment abstained, the sample keeps
        the rewards of earlier turns; it fails when there are none."""
        if failure.kind is FailureKind.abstained and self._is_judged:
            self.end = EndReason.done
        else:
            self.failure, self.end = failure, EndReason.failed

    def _end_at(self, limit: EndReason) -> None:
        """End the conversation at a limit. It fails when every component abstained in every turn."""
        self.end = limit
        if self.rewards and not self._is_judged:
            named = ", ".join(self.rewards)
            reason = f"the reward is None in every turn ({named}), so nothing judged the sample"
            self._end_unjudged(Failure(FailureKind.abstained, reason))

    @property
    def _is_judged(self) -> bool:
        return any(value is not None for value in self.rewards.values())

    def add_observation(self, text: str, encoded: Encoded) -> None:
        """Append the environment's observation; end the conversation instead when it leaves no room for a
        response."""
        if len(encoded.token_ids) >= self.num_tokens_left:
            self._end_at(EndReason.token_limit)
            return
        # The latest value counts, so it has the images of all observations so far.
        columns = {
            _OBSERVED[name]: [*self._latest(_OBSERVED[name]), *values]
            for name, values in encoded.columns.items()
        }
        self.passages.append(Passage(np.asarray(encoded.token_ids, dtype=np.int32), None, columns))
        self.observed_images.append(encoded.images)
        self.history.append(Exchange(self.latest_response, text))

    def _latest(self, column: str) -> Any:
        """Return the latest value of a ragged column, or an empty tuple before the first."""
        given = (one.columns[column] for one in reversed(self.passages) if column in one.columns)
        return next(given, ())

    def said(self, observation_role: str) -> Prompt:
        """Return the prompt and all turns, as text or as messages, which the next response will continue."""
        prompt = self.task_prompt.prompt
        if isinstance(prompt, str):
            return prompt + "".join(one.response + one.observation for one in self.history)
        for one in self.history:
            prompt = (*with_response(prompt, one.response), Message(observation_role, one.observation))
        return prompt

    def transcript(self) -> str:
        """Return the text after the prompt, for people to read; with several turns each line names the
        speaker."""
        if not self.history:
            return self.latest_response
        said = [
            f"[assistant] {exchange.response}\n[environment] {exchange.observation}\n"
            for exchange in self.history
        ]
        return "".join(["\n", *said, f"[assistant] {self.latest_response}"])

    @property
    def _is_out_of_tokens(self) -> bool:
        """Whether the latest response was cut short, or fewer than two tokens are left: one to observe, one
        to respond."""
        return self.latest_is_truncated or self.num_tokens_left < 2

    @property
    def _is_out_of_turns(self) -> bool:
        return self.num_turns >= self.limits.max_turns


def _add(sums: dict[str, float], values: Mapping[str, float]) -> None:
    for name, value in values.items():
        sums[name] = sums.get(name, 0.0) + value


def _add_rewards(sums: dict[str, float | None], values: Mapping[str, float | None]) -> None:
    """Add a turn's reward components to ``sums``; a component that abstains in every turn stays None."""
    for name, value in values.items():
        before = sums.get(name)
        sums[name] = before if value is None else (before or 0.0) + value
