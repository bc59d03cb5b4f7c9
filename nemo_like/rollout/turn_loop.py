"""Holds the conversations of one rollout, turn by turn, from the first request to the last reward.

    requests ──▶ engines ──▶ on_groups (a callback per engine step in which responses finished)
       ▲                         │ decode, in a thread
       │ observation             ▼
       └──────────────── environment ──▶ rewards; the last reward ends the rollout

Nothing polls. A conversation waits for others only where they share an environment call
(``env.<name>.batch_size``); its next turn is requested as soon as its observation is there.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from nemo_like.batch.columnar import Columnar
from nemo_like.cluster.actor_errors import Overdue
from nemo_like.data.interface import Encoded, Observation, TaskPrompt
from nemo_like.data.template_turns import TurnError
from nemo_like.data_plane.storage_errors import listed
from nemo_like.environments.interface import UNNUMBERED, Failure, FailureKind, Feedback, Turn
from nemo_like.generation.interface import GroupRequest, GroupResult, Response, VersionSpan
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.rollout.conversation import Conversation
from nemo_like.rollout.prompts import WantedGroups, piece_seed, turn_seed
from nemo_like.rollout.response_form import ResponseForm
from nemo_like.rollout.token_allowance import TokenAllowance


class Engine(Protocol):
    """A handle that calls a generation engine in an actor. ``ActorHandle`` is one."""

    @property
    def name(self) -> str: ...

    def submit(self, method: str, /, *args: Any) -> Any:
        """Call a method of the engine's actor, and return an awaitable of its result."""


class Judge(Protocol):
    """Answers turns with feedback. ``EnvironmentPool`` is one."""

    @property
    def unanswered(self) -> Sequence[str]:
        """The names of the actors that have an unanswered call."""

    @property
    def wants_tokens(self) -> bool:
        """Whether turns need their ``response_ids``."""

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]: ...


class Codec(Protocol):
    """Converts between token ids and text or images. ``PromptEncoder`` is one."""

    def decode_response(self, token_ids: Iterable[int], stop_token_ids: Collection[int]) -> str: ...

    def encode_observation(
        self, asked: TaskPrompt, observation: Observation, role: str, last_token_id: int
    ) -> Encoded: ...


class Player(Protocol):
    """Lets an agent hold a conversation, from its first call to its reward."""

    async def play(self, conversation: Conversation, policy_version: int) -> None: ...

    def forget(self, conversations: Sequence[Conversation]) -> None:
        """Forget conversations that have ended or were abandoned."""


@dataclass(frozen=True, slots=True)
class Task:
    """The settings with which the conversations of one environment are held."""

    judge: Judge
    sampling: SamplingSettings
    max_turns: int
    batch_size: int  # the most conversations in one environment call
    observation_role: str  # under which a chat template renders observations
    is_said: bool = False  # whether requests have the conversation so far, besides its tokens
    form: ResponseForm | None = None  # what is looked for in responses
    call_pattern: re.Pattern[str] | None = None  # finds the tool calls in a response
    player: Player | None = None  # for an agent's environment: the agent makes all requests itself


@dataclass(frozen=True, slots=True)
class _Request:
    """A request to an engine, and the conversations to which its responses belong, in order."""

    group: GroupRequest
    sampling: SamplingSettings
    conversations: tuple[Conversation, ...]
    is_piece: bool  # whether another request continues those responses that come to max_new_tokens


@dataclass(frozen=True, slots=True)
class _Answered:
    """A conversation's complete response, and the policy versions that sampled its last piece."""

    conversation: Conversation
    response: Response
    versions: VersionSpan


class TurnLoop:
    """Holds the conversations of one rollout; ``groups[i]`` has the conversations of prompt i."""

    def __init__(
        self,
        rollout_id: str,
        groups: Sequence[Sequence[Conversation]],
        tasks: Mapping[str, Task],
        codec: Codec,
        versions: range,
        allowance: TokenAllowance,
    ) -> None:
        """Prepare the rollout, on a running event loop.

        Every token must be sampled by the weights of one of ``versions``; ``allowance`` says how many tokens
        a sample may have by now.
        """
        self.groups = groups
        self._rollout_id, self._versions, self._allowance = rollout_id, versions, allowance
        self._tasks, self._codec = tasks, codec
        self._engines: Sequence[Engine] = ()
        self._sink: object = None
        self._requested: dict[str, _Request] = {}
        self._held: list[Conversation] = []  # they go on when a later step lets them
        self._num_unfinished = [sum(sample.end is None for sample in group) for group in groups]  # by group
        self._ended = [position for position, count in enumerate(self._num_unfinished) if not count]
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()  # a group has ended, or the rollout has failed
        self._due: float | None = None  # on the event loop's clock; not before somebody waits
        self._working: set[asyncio.Task[None]] = set()
        self._decoding = asyncio.Lock()
        # Times on the monotonic clock: of the first request, and of the latest response.
        self.started_s = self.generated_s = 0.0
        # For the tripwires.
        self.seeds: list[int] = []  # of all requested responses
        self.weights_digests: set[int | None] = set()  # of the weights that sampled
        self.num_misplaced_answers = 0  # answers of environments that name another turn than the one asked

    async def run(self, engines: Sequence[Engine], sink: object) -> None:
        """Hold all conversations, and return once every one has ended.

        Engines deliver responses to ``sink``, which passes them to ``on_groups``. Raises an error of a
        request or of an environment call, or the error given to ``fail``; ``ended_groups`` raises the same.
        """
        self._engines, self._sink = engines, sink
        self.started_s = self.generated_s = time.monotonic()
        try:
            self._start_agents()
            first = [request for group in self.groups for request in self._first_requests(group)]
            self._start(self._submit(first))
            await self._reached(lambda: len(self._ended) == len(self.groups))
        except Exception as error:
            self.fail(error)
            raise
        finally:
            for task in self._working:
                task.cancel()
            for player in {task.player for task in self._tasks.values() if task.player is not None}:
                player.forget([one for group in self.groups for one in group])

    async def ended_groups(self, taken: Collection[int], wanted: WantedGroups, timeout_s: float) -> list[int]:
        """Wait until the groups that ``wanted`` names have ended, or ``wanted.at_least`` groups that are not
        in ``taken``, or all that are left. Return their positions in ascending order.

        Raises the error that failed the rollout. Raises Overdue, which names the unfinished samples and the
        processes that owe them, when groups are missing ``timeout_s`` after the first call. A rollout ahead
        of its step has no deadline until this first call.
        """
        if self._due is None:
            self._due = asyncio.get_running_loop().time() + timeout_s
        num_ended = wanted.num_ended(len(taken), len(self.groups))

        def are_there() -> bool:
            if wanted.positions:
                return set(wanted.positions) <= set(self._ended)
            return len(self._ended) >= num_ended

        try:
            async with asyncio.timeout_at(self._due):
                await self._reached(are_there)
        except TimeoutError:
            overdue = self._overdue(timeout_s)
            self.fail(overdue)
            raise overdue from None
        return sorted(wanted.positions or set(self._ended) - set(taken))

    def begin_step(self, step: int) -> None:
        """Continue the samples that had to wait for this step."""
        self._allowance.begin_step(step)
        held, self._held = self._held, []
        if held and self._failure is None:
            self._start(self._go_on(held))

    async def _reached(self, is_reached: Callable[[], bool]) -> None:
        """Wait until ``is_reached`` returns true, asking again whenever a group ends; raise the error that
        failed the rollout."""
        while self._failure is None and not is_reached():
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure

    def on_groups(self, results: Sequence[GroupResult]) -> None:
        """Take the responses of one engine step; ignore responses that this rollout has not requested.

        An engine may still deliver responses of an earlier rollout that failed.
        """
        try:
            self._accept(results)
        except Exception as error:
            # The engine does not wait for an answer, so only the rollout can raise this.
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the waits for groups with ``error``, unless the rollout has already failed."""
        self._failure = self._failure or error
        self._changed.set()

    def _overdue(self, timeout_s: float) -> Overdue:
        """Return an error that names the responses that each engine owes, and the missing rewards."""
        responses: dict[str, list[str]] = {}
        for request in self._requested.values():
            for sample in request.conversations:
                responses.setdefault(self._engine_of(sample).name, []).append(_sample_id(sample))
        requested = {sample for samples in responses.values() for sample in samples}
        unfinished = [_sample_id(c) for group in self.groups for c in group if c.end is None]
        judges = sorted({actor for task in self._tasks.values() for actor in task.judge.unanswered})
        owed = [f"responses {listed(of)} of {engine}" for engine, of in sorted(responses.items())]
        if held := [_sample_id(sample) for sample in self._held]:
            owed.append(f"the rest of {listed(held)}, which wait for a later step")
        if rewards := [sample for sample in unfinished if sample not in {*requested, *held}]:
            owed.append(f"rewards {listed(rewards)} of {', '.join(judges)}")
        return Overdue(
            f"rollout {self._rollout_id!r} did not end within {timeout_s:g} s; missing are, by "
            f"prompt/sample, {'; '.join(owed)}",
            (*sorted(responses), *judges),
        )

    def _engine_of(self, conversation: Conversation) -> Engine:
        return self._engines[conversation.position % len(self._engines)]

    def _accept(self, results: Sequence[GroupResult]) -> None:
        answered: list[_Answered] = []
        begun: list[Conversation] = []
        for result in results:
            request = self._requested.pop(result.request_id, None)
            if request is None:
                continue
            spans = result.version_spans()
            self._check_versions(result.request_id, spans)
            self.weights_digests.add(result.weights_digest)
            for sample, response, span in zip(request.conversations, result.responses, spans, strict=True):
                if request.is_piece and response.is_truncated:
                    sample.begin_response(response, span.oldest)
                    begun.append(sample)
                else:
                    answered.append(_Answered(sample, sample.with_begun(response), span))
        _mark(one.conversation for one in answered)
        if not self._requested:
            self.generated_s = time.monotonic()
        if begun:
            self._start(self._go_on(begun))
        if answered:
            self._start(self._have_judged(answered))

    def _check_versions(self, request_id: str, spans: Sequence[VersionSpan]) -> None:
        """Raise RuntimeError unless only this rollout's policy versions sampled the responses of a
        request."""
        for span in spans:
            if span.oldest not in self._versions or span.newest not in self._versions:
                by = f"{span.oldest}" if span.oldest == span.newest else f"{span.oldest} to {span.newest}"
                first, last = self._versions[0], self._versions[-1]
                wanted = f"{first}" if first == last else f"{first} to {last}"
                raise RuntimeError(
                    f"group {request_id!r} was sampled by policy version {by}, not by {wanted}"
                )

    async def _have_judged(self, answered: Sequence[_Answered]) -> None:
        """Decode the responses, add them to their conversations, and start asking the environments."""
        # Decoding runs in a thread, so that the event loop takes in what else arrives meanwhile. One thread
        # runs at a time: more would leave the loop less of the interpreter, and this way what came first is
        # judged first.
        async with self._decoding:
            texts = await asyncio.to_thread(self._decoded, answered)
        by_env: dict[str, list[Conversation]] = {}
        for one, text in zip(answered, texts, strict=True):
            conversation = one.conversation
            conversation.add_response(one.response, text, one.versions.oldest)
            self._flag(conversation, text)
            by_env.setdefault(conversation.task_prompt.env, []).append(conversation)
        for env, conversations in by_env.items():
            size = self._tasks[env].batch_size
            for start in range(0, len(conversations), size):
                self._start(self._judge(self._tasks[env], conversations[start : start + size]))

    def _flag(self, conversation: Conversation, text: str) -> None:
        """Note what is wrong with the form of a response, where the run looks for it."""
        task = self._tasks[conversation.task_prompt.env]
        if task.form is not None:
            is_truncated = conversation.latest_is_truncated
            found = task.form.of_text(text, task.call_pattern, is_truncated=is_truncated)
            conversation.flag_response(found, task.form.watched)

    def _decoded(self, answered: Sequence[_Answered]) -> list[str]:
        return [self._text(one.response, one.conversation.task_prompt.env) for one in answered]

    def _text(self, response: Response, env: str) -> str:
        if response.text is not None:
            return response.text
        return self._codec.decode_response(response.token_ids, self._tasks[env].sampling.stop_token_ids)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` as a task of its own; the rollout fails when it raises."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._on_done)
        self._working.add(task)

    async def _judge(self, task: Task, conversations: Sequence[Conversation]) -> None:
        """Ask the environment about these conversations, and request the next turn of each that goes on."""
        with_tokens = task.judge.wants_tokens
        feedback = await task.judge.step([one.turn(with_tokens=with_tokens) for one in conversations])
        _mark(conversations)
        for conversation, answer in zip(conversations, feedback, strict=True):
            self.num_misplaced_answers += answer.turn_number not in (conversation.turn_number, UNNUMBERED)
            conversation.add_feedback(answer)
            if conversation.end is None:
                await self._observe(conversation, answer.said, task)
        going_on = [conversation for conversation in conversations if conversation.end is None]
        self._count_ended([conversation for conversation in conversations if conversation.end is not None])
        await self._go_on(going_on)

    async def _go_on(self, conversations: Sequence[Conversation]) -> None:
        """Request the next response of each conversation, or the rest of a response that is not complete.
        Conversations that have used up their tokens are held until a later step."""
        requests = []
        for conversation in conversations:
            if self._allowance.is_spent(conversation.num_response_tokens):
                self._held.append(conversation)
            else:
                requests.append(self._next_request(conversation))
        await self._submit(requests)

    def _start_agents(self) -> None:
        for conversation in (one for group in self.groups for one in group if one.end is None):
            player = self._tasks[conversation.task_prompt.env].player
            if player is not None:
                self._start(self._play(player, conversation))

    async def _play(self, player: Player, conversation: Conversation) -> None:
        """Let an agent hold a conversation."""
        await player.play(conversation, self._versions[0])
        self.generated_s = time.monotonic()
        self._count_ended([conversation])

    def _count_ended(self, conversations: Sequence[Conversation]) -> None:
        for conversation in conversations:
            if (form := self._tasks[conversation.task_prompt.env].form) is not None:
                conversation.withhold_reward(form.unrewarded)
            self._num_unfinished[conversation.position] -= 1
            if not self._num_unfinished[conversation.position]:
                self._ended.append(conversation.position)
                self._changed.set()

    async def _observe(self, conversation: Conversation, observation: Observation, task: Task) -> None:
        """Add an observation to its conversation; end the conversation when an image cannot be used."""
        arguments = (
            conversation.task_prompt,
            observation,
            task.observation_role,
            conversation.last_token_id,
        )
        try:
            if observation.images:  # these take milliseconds each, in which the event loop goes on
                encoded = await asyncio.to_thread(self._codec.encode_observation, *arguments)
            else:
                encoded = self._codec.encode_observation(*arguments)
        except TurnError as error:
            key = f"env.{conversation.task_prompt.env}.observation_role={task.observation_role}"
            raise ValueError(f"{key}: the chat template {error}") from error
        if encoded.failure is None:
            conversation.add_observation(observation.text, encoded)
        else:
            conversation.fail(Failure(FailureKind.bad_image, encoded.failure), self._versions[0])

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Fail the rollout if the task raised."""
        self._working.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    def _first_requests(self, group: Sequence[Conversation]) -> list[_Request]:
        """Return the requests for a group's first responses.

        With one turn, one request asks for all responses, and they come together. With more, each response
        has a request of its own, and comes as soon as it is finished. A group that has already ended has
        none.
        """
        if group[0].end is not None or self._tasks[group[0].task_prompt.env].player is not None:
            return []
        if self._tasks[group[0].task_prompt.env].max_turns > 1:
            return [self._request(f"{c.position}/{c.generation}/1", (c,), (c.seed,)) for c in group]
        return [self._request(str(group[0].position), tuple(group), tuple(c.seed for c in group))]

    def _next_request(self, conversation: Conversation) -> _Request:
        turn, num_begun = conversation.num_turns + 1, conversation.num_begun
        name = f"{conversation.position}/{conversation.generation}/{turn}"
        if num_begun:
            seed = piece_seed(conversation.seed, turn, num_begun)
            return self._request(f"{name}+{num_begun}", (conversation,), (seed,))
        return self._request(name, (conversation,), (turn_seed(conversation.seed, turn),))

    def _request(
        self, name: str, conversations: tuple[Conversation, ...], seeds: tuple[int, ...]
    ) -> _Request:
        first = conversations[0]
        sampling, num_left = self._tasks[first.task_prompt.env].sampling, first.num_tokens_left
        if num_left < 1:
            raise ValueError(
                f"prompt {first.position} of rollout {self._rollout_id!r} has {len(first.prompt_ids)} "
                f"tokens, which leaves no room for a response in {first.limits.max_tokens}; use shorter "
                "prompts or raise policy.max_total_sequence_length"
            )
        limit = min(sampling.max_new_tokens - first.num_begun, num_left)
        piece = self._allowance.next_piece(first.num_response_tokens)
        is_piece = piece is not None and piece < limit
        limit = limit if piece is None else min(piece, limit)
        if limit != sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=limit)
        task = self._tasks[first.task_prompt.env]
        group = GroupRequest(
            *(f"{self._rollout_id}/{name}", first.token_ids(), seeds, first.images(), first.num_known),
            said=first.said(task.observation_role) if task.is_said else None,
        )
        return _Request(group, sampling, conversations, is_piece)

    async def _submit(self, requests: Sequence[_Request]) -> None:
        """Send the requests to the engines, in one call per engine and sampling settings.

        All turns of a prompt go to the same engine, whose cache may hold the earlier turns.
        """
        calls: dict[tuple[int, SamplingSettings], list[GroupRequest]] = {}
        for request in requests:
            self._requested[request.group.request_id] = request
            _mark(one for one in request.conversations if one.begun is None)
            self.seeds += request.group.seeds
            engine = request.conversations[0].position % len(self._engines)
            calls.setdefault((engine, request.sampling), []).append(request.group)
        await asyncio.gather(
            *(
                self._engines[engine].submit("submit", Columnar(groups), sampling, self._sink)
                for (engine, sampling), groups in calls.items()
            )
        )


def _mark(conversations: Iterable[Conversation]) -> None:
    """Append the present time to the moments of each conversation."""
    now_s = time.monotonic()
    for conversation in conversations:
        conversation.moments_s.append(now_s)


def _sample_id(conversation: Conversation) -> str:
    return f"{conversation.position}/{conversation.generation}"
