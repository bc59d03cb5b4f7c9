"""Holds the conversations of one rollout, turn by turn, from the first request to the last reward.

    requests ──▶ engines ──▶ on_groups (a callback per engine step in which responses finished)
       ▲                         │ decode, in a thread
       │ observation             ▼
       └──────────────── environment ──▶ rewards; the last one resolves the rollout

Nothing polls. A conversation waits for others only where they share an environment call
(``env.<name>.batch_size``); its next turn is requested as soon as its observation is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nemo_like.batch.columnar import Columnar
from nemo_like.cluster.actor_errors import Overdue
from nemo_like.config.tasks import SamplingSettings
from nemo_like.data.interface import Encoded, Observation, Prompt
from nemo_like.data_plane.storage_errors import listed
from nemo_like.environments.interface import UNNUMBERED, Failure, FailureKind, Feedback, Turn
from nemo_like.generation.interface import GroupRequest, GroupResult, Response
from nemo_like.rollout.conversation import Conversation
from nemo_like.rollout.prompts import turn_seed


class Engine(Protocol):
    """What calls a generation engine in an actor; ``ActorHandle`` is one."""

    @property
    def name(self) -> str: ...

    def submit(self, method: str, /, *args: Any) -> Any:
        """Call a method of the engine's actor, and return what can be awaited for the result."""


class Judge(Protocol):
    """Answers turns; ``EnvironmentPool`` is one."""

    @property
    def unanswered(self) -> Sequence[str]:
        """The names of the actors that have a call to answer."""

    @property
    def wants_tokens(self) -> bool:
        """Whether turns need their ``response_ids``."""

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]: ...


class Codec(Protocol):
    """Converts between token ids and text or images; ``PromptEncoder`` is one."""

    def decode(self, token_ids: Iterable[int]) -> str: ...

    def encode_observation(
        self, prompt: Prompt, observation: Observation, role: str, last_token_id: int
    ) -> Encoded: ...


@dataclass(frozen=True, slots=True)
class Task:
    """How to hold the conversations of one environment."""

    judge: Judge
    sampling: SamplingSettings
    max_turns: int
    batch_size: int  # at most so many conversations in one environment call
    observation_role: str  # under which a chat template renders observations


@dataclass(frozen=True, slots=True)
class _Request:
    """A request to an engine, and the conversations to which its responses belong, in order."""

    group: GroupRequest
    sampling: SamplingSettings
    conversations: tuple[Conversation, ...]


class TurnLoop:
    """Holds the conversations of one rollout; ``groups[i]`` are those of prompt i."""

    def __init__(
        self,
        rollout_id: str,
        groups: Sequence[Sequence[Conversation]],
        tasks: Mapping[str, Task],
        codec: Codec,
        policy_version: int,
    ) -> None:
        """Prepare the rollout. Every response must be sampled by the weights of ``policy_version``.

        To be called on a running event loop.
        """
        self.groups = groups
        self._rollout_id, self._policy_version = rollout_id, policy_version
        self._tasks, self._codec = tasks, codec
        self._engines: Sequence[Engine] = ()
        self._sink: object = None
        self._requested: dict[str, _Request] = {}
        self._num_unfinished = sum(sample.end is None for group in groups for sample in group)
        self._finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._working: set[asyncio.Task[None]] = set()
        self._decoding = asyncio.Lock()
        # Times on the monotonic clock: of the first request, and of the latest response.
        self.started_s = self.generated_s = 0.0
        # For the tripwires.
        self.seeds: list[int] = []  # of all requested responses
        self.weights_digests: set[int | None] = set()  # of the weights that sampled
        self.num_misplaced_answers = 0  # of the environments, to other turns than those that they came for

    async def run(self, engines: Sequence[Engine], sink: object, timeout_s: float) -> None:
        """Hold all conversations, and return once every one has ended.

        Engines deliver responses to ``sink``, which calls ``on_groups``. Raises Overdue after ``timeout_s``,
        naming the unfinished samples and which process owes them, or what a request or an environment call
        raised.
        """
        self._engines, self._sink = engines, sink
        self.started_s = self.generated_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                await self._submit([first for group in self.groups for first in self._first_requests(group)])
                if self._num_unfinished:
                    await self._finished
        except TimeoutError:
            raise self._overdue(timeout_s) from None
        finally:
            for task in self._working:
                task.cancel()

    def on_groups(self, results: Sequence[GroupResult]) -> None:
        """Take the responses of one engine step; ignore those that this rollout has not requested.

        An engine may still deliver those of an earlier rollout, which failed.
        """
        try:
            self._accept(results)
        except Exception as error:
            # The engine does not wait for an answer, so only the rollout can raise this.
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the wait for the rollout with this error, unless it has ended already."""
        if not self._finished.done():
            self._finished.set_exception(error)

    def _overdue(self, timeout_s: float) -> Overdue:
        """Return an error that names the responses that each engine owes, and the rewards still missing."""
        responses: dict[str, list[str]] = {}
        for request in self._requested.values():
            for sample in request.conversations:
                responses.setdefault(self._engine_of(sample).name, []).append(_sample_id(sample))
        requested = {sample for samples in responses.values() for sample in samples}
        unfinished = [_sample_id(c) for group in self.groups for c in group if c.end is None]
        judges = sorted({actor for task in self._tasks.values() for actor in task.judge.unanswered})
        owed = [f"responses {listed(of)} of {engine}" for engine, of in sorted(responses.items())]
        if rewards := [sample for sample in unfinished if sample not in requested]:
            owed.append(f"rewards {listed(rewards)} of {', '.join(judges)}")
        return Overdue(
            f"rollout {self._rollout_id!r} did not end within {timeout_s:g} s; missing are, by "
            f"prompt/sample, {'; '.join(owed)}",
            (*sorted(responses), *judges),
        )

    def _engine_of(self, conversation: Conversation) -> Engine:
        return self._engines[conversation.position % len(self._engines)]

    def _accept(self, results: Sequence[GroupResult]) -> None:
        answered: list[tuple[Conversation, Response]] = []
        for result in results:
            request = self._requested.pop(result.request_id, None)
            if request is None:
                continue
            if result.policy_version != self._policy_version:
                raise RuntimeError(
                    f"group {result.request_id!r} was sampled by policy version {result.policy_version}, "
                    f"not by {self._policy_version}"
                )
            self.weights_digests.add(result.weights_digest)
            answered += zip(request.conversations, result.responses, strict=True)
        if not self._requested:
            self.generated_s = time.monotonic()
        if answered:
            self._start(self._have_judged(answered))

    async def _have_judged(self, answered: Sequence[tuple[Conversation, Response]]) -> None:
        """Decode the responses, add them to their conversations, and start asking the environments."""
        # Decoding runs in a thread, so that the event loop takes in what else arrives meanwhile. One thread
        # runs at a time: more would leave the loop less of the interpreter, and this way what came first is
        # judged first.
        async with self._decoding:
            texts = await asyncio.to_thread(self._decoded, [response for _, response in answered])
        by_env: dict[str, list[Conversation]] = {}
        for (conversation, response), text in zip(answered, texts, strict=True):
            conversation.add_response(response, text, self._policy_version)
            by_env.setdefault(conversation.example.env, []).append(conversation)
        for env, conversations in by_env.items():
            size = self._tasks[env].batch_size
            for start in range(0, len(conversations), size):
                self._start(self._judge(self._tasks[env], conversations[start : start + size]))

    def _decoded(self, responses: Sequence[Response]) -> list[str]:
        return [self._codec.decode(response.token_ids) for response in responses]

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` as a task of its own; when it raises, the rollout fails."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._on_done)
        self._working.add(task)

    async def _judge(self, task: Task, conversations: Sequence[Conversation]) -> None:
        """Ask the environment about these conversations, and request the next turn of those that go on."""
        with_tokens = task.judge.wants_tokens
        feedback = await task.judge.step([one.turn(with_tokens=with_tokens) for one in conversations])
        for conversation, answer in zip(conversations, feedback, strict=True):
            self.num_misplaced_answers += answer.turn_number not in (conversation.turn_number, UNNUMBERED)
            conversation.add_feedback(answer)
            if conversation.end is None:
                await self._observe(conversation, answer.said, task)
        going_on = [conversation for conversation in conversations if conversation.end is None]
        self._num_unfinished -= len(conversations) - len(going_on)
        await self._submit([self._next_request(conversation) for conversation in going_on])

    async def _observe(self, conversation: Conversation, observation: Observation, task: Task) -> None:
        """Add an observation to its conversation, or end the conversation where an image cannot be used."""
        arguments = (
            conversation.example.prompt,
            observation,
            task.observation_role,
            conversation.last_token_id,
        )
        if observation.images:  # these take milliseconds each, in which the event loop goes on
            encoded = await asyncio.to_thread(self._codec.encode_observation, *arguments)
        else:
            encoded = self._codec.encode_observation(*arguments)
        if encoded.failure is None:
            conversation.add_observation(observation.text, encoded)
        else:
            conversation.fail(Failure(FailureKind.bad_image, encoded.failure), self._policy_version)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Fail the rollout if the task raised; resolve it if no conversation is left unfinished."""
        self._working.discard(task)
        if task.cancelled():
            return
        if error := task.exception():
            self.fail(error)
        elif not self._num_unfinished and not self._finished.done():
            self._finished.set_result(None)

    def _first_requests(self, group: Sequence[Conversation]) -> list[_Request]:
        """Make the requests for a group's first responses.

        With one turn, one request asks for all of them, and they come together. With more, each response has
        a request of its own, and comes as soon as it is finished. A group that has ended already needs none.
        """
        if group[0].end is not None:
            return []
        if self._tasks[group[0].example.env].max_turns > 1:
            return [self._request(f"{c.position}/{c.generation}/1", (c,), (c.seed,)) for c in group]
        return [self._request(str(group[0].position), tuple(group), tuple(c.seed for c in group))]

    def _next_request(self, conversation: Conversation) -> _Request:
        turn = conversation.num_turns + 1
        name = f"{conversation.position}/{conversation.generation}/{turn}"
        return self._request(name, (conversation,), (turn_seed(conversation.seed, turn),))

    def _request(
        self, name: str, conversations: tuple[Conversation, ...], seeds: tuple[int, ...]
    ) -> _Request:
        first = conversations[0]
        sampling, num_left = self._tasks[first.example.env].sampling, first.num_tokens_left
        if num_left < 1:
            raise ValueError(
                f"prompt {first.position} of rollout {self._rollout_id!r} has {len(first.prompt_ids)} "
                f"tokens, which leaves no room for a response in {first.limits.max_tokens}; use shorter "
                "prompts or raise policy.max_total_sequence_length"
            )
        if num_left < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=num_left)
        group = GroupRequest(
            f"{self._rollout_id}/{name}", first.token_ids(), seeds, first.images(), first.num_known
        )
        return _Request(group, sampling, conversations)

    async def _submit(self, requests: Sequence[_Request]) -> None:
        """Send the requests to the engines, in one call per engine and sampling settings.

        All turns of a prompt go to the same engine, which may have the earlier ones in its cache.
        """
        calls: dict[tuple[int, SamplingSettings], list[GroupRequest]] = {}
        for request in requests:
            self._requested[request.group.request_id] = request
            self.seeds += request.group.seeds
            engine = request.conversations[0].position % len(self._engines)
            calls.setdefault((engine, request.sampling), []).append(request.group)
        await asyncio.gather(
            *(
                self._engines[engine].submit("submit", Columnar(groups), sampling, self._sink)
                for (engine, sampling), groups in calls.items()
            )
        )


def _sample_id(conversation: Conversation) -> str:
    return f"{conversation.position}/{conversation.generation}"
