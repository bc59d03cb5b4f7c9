"""The loop with engines and environments that the tests play themselves."""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from nemo_like.algorithms.message_flags import NO_FLAG, MessageFlag
from nemo_like.cluster.actor_errors import Overdue
from nemo_like.data.images import Picture
from nemo_like.data.interface import Encoded, Observation
from nemo_like.environments.interface import Failure, FailureKind, Feedback, Turn
from nemo_like.generation.interface import GroupRequest, GroupResult
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.rollout.conversation import Conversation, EndReason
from nemo_like.rollout.prompts import WantedGroups, piece_seed, turn_seed
from nemo_like.rollout.response_form import ResponseForm
from nemo_like.rollout.token_allowance import TokenAllowance
from nemo_like.rollout.turn_loop import Codec, Task, TurnLoop
from tests.unit.rollout.conversations import conversation, response

SAMPLING = SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8, stop_token_ids=(1,))
TIMEOUT_S = 20.0
NO_LIMIT = TokenAllowance(None, begun_in=6, step=6)


class Text:
    """Token 20 + i is the letter number i."""

    def decode_response(self, token_ids: Any, stop_token_ids: Any) -> str:
        return "".join(chr(ord("a") + int(token) - 20) for token in token_ids)

    def encode_observation(
        self, asked: Any, observation: Observation, role: str, last_token_id: int
    ) -> Encoded:
        """Each image has the token 9; one whose file is "gone" cannot be read."""
        files = tuple(picture.read() for picture in observation.images)
        if b"gone" in files:
            return Encoded((), failure="gone.png cannot be read")
        letters = tuple(20 + ord(letter) - ord("a") for letter in observation.text.replace("<image>", ""))
        columns = {"pixel_values": list(files)} if files else {}
        return Encoded((*([9] * len(files)), *letters), files, columns)


class HeldText(Text):
    """Decodes once it may."""

    def __init__(self) -> None:
        self.may_decode = threading.Event()

    def decode_response(self, token_ids: Any, stop_token_ids: Any) -> str:
        assert self.may_decode.wait(TIMEOUT_S)
        return super().decode_response(token_ids, stop_token_ids)


@dataclass
class Engine:
    """Takes requests; the test decides when they are answered."""

    name: str = "engine-0"
    requests: dict[str, tuple[GroupRequest, SamplingSettings]] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(
        self, method: str, groups: Sequence[GroupRequest], sampling: SamplingSettings, sink: object
    ) -> None:
        assert method == "submit"
        self.requests |= {group.request_id: (group, sampling) for group in groups}
        self.arrived.set()

    async def request(self, request_id: str) -> tuple[GroupRequest, SamplingSettings]:
        """Wait for it."""
        while request_id not in self.requests:
            self.arrived.clear()
            await self.arrived.wait()
        return self.requests[request_id]


@dataclass
class Judge:
    """Answers with what ``feedback`` says of each turn."""

    feedback: Callable[[Turn], Awaitable[Feedback]]
    calls: list[list[str]] = field(default_factory=list)
    unanswered: Sequence[str] = ("sums-0",)
    wants_tokens: bool = False

    async def step(self, turns: Sequence[Turn]) -> list[Feedback]:
        self.calls.append([turn.response for turn in turns])
        return [await self.feedback(turn) for turn in turns]


def result(request_id: str, *tokens: list[int], version: int = 5, is_truncated: bool = False) -> GroupResult:
    responses = tuple(response(ids, is_truncated=is_truncated) for ids in tokens)
    return GroupResult(request_id, responses, version)


def loop_of(
    groups: list[list[Conversation]],
    judge: Judge,
    *,
    max_turns: int = 1,
    batch_size: int = 8,
    codec: Codec | None = None,
    allowance: TokenAllowance = NO_LIMIT,
    form: ResponseForm | None = None,
) -> TurnLoop:
    task = Task(judge, SAMPLING, max_turns, batch_size, observation_role="user", form=form)
    return TurnLoop(
        "training/6", groups, {"sums": task}, codec or Text(), versions=range(5, 8), allowance=allowance
    )


async def right(turn: Turn) -> Feedback:
    return Feedback({"right": 1.0})


async def until_done(turn: Turn) -> Feedback:
    """Goes on until the response is "z"."""
    return Feedback({"right": 1.0}) if turn.response == "z" else Feedback(observation="k", is_done=False)


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), TIMEOUT_S))


def test_seeds_digests_and_answers_to_other_turns_are_kept_for_the_tripwires() -> None:
    async def of_the_first(turn: Turn) -> Feedback:
        return Feedback({"right": 1.0}, turn_number=group[0].turn_number)

    group = [conversation(generation=j) for j in range(3)]

    async def scenario() -> None:
        loop, engine = loop_of([group], Judge(of_the_first)), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/0")
        loop.on_groups([replace(result("training/6/0", [20], [21], [22]), weights_digest=17)])
        await running
        assert loop.seeds == [0, 1, 2]
        assert loop.weights_digests == {17}
        assert loop.num_misplaced_answers == 2

    play(scenario)


def test_single_turns_are_requested_by_group_with_each_prompt_at_its_engine() -> None:
    async def scenario() -> None:
        groups = [[conversation((4 + i,), position=i, generation=j) for j in range(2)] for i in range(3)]
        loop, engines = loop_of(groups, Judge(right)), [Engine(), Engine()]
        running = asyncio.create_task(loop.run(engines, None))
        await engines[1].request("training/6/1")
        assert list(engines[0].requests) == ["training/6/0", "training/6/2"]
        assert engines[0].requests["training/6/2"] == (GroupRequest("training/6/2", (6,), (20, 21)), SAMPLING)
        loop.on_groups([result("training/6/0", [20], [21]), result("training/6/1", [22], [23])])
        assert not running.done()
        loop.on_groups([result("training/6/2", [24], [25])])
        await running
        assert [[c.latest_response for c in group] for group in groups] == [
            ["a", "b"],
            ["c", "d"],
            ["e", "f"],
        ]
        assert all(c.reward == 1.0 for group in groups for c in group)

    play(scenario)


def test_a_sample_goes_on_while_its_siblings_are_still_generating() -> None:
    async def scenario() -> None:
        group = [conversation((4,), generation=j, max_turns=3) for j in range(2)]
        loop, engine = loop_of([group], Judge(until_done), max_turns=3, batch_size=1), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/0/0/1")
        # Of two samples one is answered, and its next turn is requested; the other has said nothing yet.
        loop.on_groups([result("training/6/0/0/1", [20])])
        request, _ = await engine.request("training/6/0/0/2")
        # The engine has read token 4 already, and sampled 20.
        assert request == GroupRequest("training/6/0/0/2", (4, 20, 30), (turn_seed(0, 2),), num_known=1)
        loop.on_groups([result("training/6/0/0/2", [45])])
        loop.on_groups([result("training/6/0/1/1", [45])])
        await running
        assert [c.num_turns for c in group] == [2, 1]
        assert [c.end for c in group] == [EndReason.done, EndReason.done]
        # Asked for, came and judged, turn by turn.
        assert [len(c.moments_s) for c in group] == [6, 3]
        assert all(c.moments_s == sorted(c.moments_s) for c in group)
        assert min(c.moments_s[0] for c in group) >= loop.started_s

    play(scenario)


def test_a_sample_that_has_used_up_its_tokens_goes_on_in_the_next_step_with_those_it_has() -> None:
    async def scenario() -> None:
        group = [conversation((4,), generation=j) for j in range(2)]
        allowance = TokenAllowance(3, begun_in=4, step=6)
        loop, engine = loop_of([group], Judge(right), allowance=allowance), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        _, sampling = await engine.request("training/6/0")
        assert sampling == replace(SAMPLING, max_new_tokens=3)
        cut = GroupResult("training/6/0", (response([20, 21, 22], is_truncated=True), response([23, 1])), 5)
        loop.on_groups([cut])
        await asyncio.sleep(0)
        assert list(engine.requests) == ["training/6/0"]
        assert "the rest of 0/0" in str(loop._overdue(1.0))

        loop.begin_step(5)
        request, sampling = await engine.request("training/6/0/0/1+3")
        # The engine has read all but the last token, 22.
        assert request == GroupRequest(
            "training/6/0/0/1+3", (4, 20, 21, 22), (piece_seed(0, 1, 3),), num_known=3
        )
        assert sampling == replace(SAMPLING, max_new_tokens=3)
        loop.begin_step(6)
        loop.on_groups([result("training/6/0/0/1+3", [24, 25, 26], version=6, is_truncated=True)])
        # What is left of SAMPLING's 8 tokens is less than another piece.
        _, sampling = await engine.request("training/6/0/0/1+6")
        assert sampling == replace(SAMPLING, max_new_tokens=2)
        loop.on_groups([result("training/6/0/0/1+6", [27, 1], version=7)])
        await running
        assert group[0].passages[0].token_ids.tolist() == [20, 21, 22, 24, 25, 26, 27, 1]
        assert [one.policy_version for one in group] == [5, 5]
        assert [one.num_continued for one in group] == [2, 0]
        assert [one.num_turns for one in group] == [1, 1]
        assert [len(one.moments_s) for one in group] == [3, 3]
        assert not group[0].is_truncated

    play(scenario)


def test_the_tokens_of_a_step_are_counted_over_all_turns() -> None:
    async def scenario() -> None:
        sample = conversation((4,), max_turns=3)
        allowance = TokenAllowance(2, begun_in=5, step=6)
        loop, engine = loop_of([[sample]], Judge(until_done), max_turns=3, allowance=allowance), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/0/0/1")
        loop.on_groups([result("training/6/0/0/1", [20])])
        _, sampling = await engine.request("training/6/0/0/2")
        assert sampling.max_new_tokens == 1
        loop.on_groups([result("training/6/0/0/2", [21])])
        while len(sample.passages) < 4:  # the second observation
            await asyncio.sleep(0.01)
        await asyncio.sleep(0)
        assert "training/6/0/0/3" not in engine.requests
        loop.begin_step(6)
        await engine.request("training/6/0/0/3")
        loop.on_groups([result("training/6/0/0/3", [45])])
        await running
        assert sample.end is EndReason.done
        assert sample.num_continued == 0

    play(scenario)


def test_decoding_holds_up_nobody() -> None:
    """The event loop goes on after the first responses came, or nobody would let them be decoded."""

    async def scenario() -> None:
        groups = [[conversation((4,), position=0)], [conversation((5,), position=1)]]
        codec, engine = HeldText(), Engine()
        loop = loop_of(groups, Judge(right), codec=codec)
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/1")
        loop.on_groups([result("training/6/0", [20])])
        loop.on_groups([result("training/6/1", [21])])
        codec.may_decode.set()
        await running
        assert [group[0].latest_response for group in groups] == ["a", "b"]

    play(scenario)


def test_a_slow_reward_holds_up_nobody_else() -> None:
    async def scenario() -> None:
        slow = asyncio.Event()

        async def feedback(turn: Turn) -> Feedback:
            if turn.response == "s":
                await slow.wait()
            return await until_done(turn)

        group = [conversation((4,), generation=j, max_turns=3) for j in range(2)]
        loop, engine = loop_of([group], Judge(feedback), max_turns=3, batch_size=1), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/0/1/1")
        loop.on_groups([result("training/6/0/0/1", [38]), result("training/6/0/1/1", [20])])
        await engine.request("training/6/0/1/2")
        loop.on_groups([result("training/6/0/1/2", [45])])
        slow.set()
        await engine.request("training/6/0/0/2")
        loop.on_groups([result("training/6/0/0/2", [45])])
        await running

    play(scenario)


def test_later_turns_may_say_no_more_than_the_conversation_has_room_for() -> None:
    async def scenario() -> None:
        sample = conversation((4,), max_turns=3, max_tokens=6)
        loop, engine = loop_of([[sample]], Judge(until_done), max_turns=3), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        _, first = await engine.request("training/6/0/0/1")
        assert first.max_new_tokens == 5
        loop.on_groups([result("training/6/0/0/1", [20, 20])])
        _, second = await engine.request("training/6/0/0/2")
        assert second.max_new_tokens == 2
        loop.on_groups([result("training/6/0/0/2", [45])])
        await running

    play(scenario)


def test_responses_that_come_together_are_judged_in_calls_of_the_batch_size() -> None:
    async def scenario() -> None:
        groups = [[conversation((4,), position=0, generation=j) for j in range(5)]]
        judge, engine = Judge(right), Engine()
        loop = loop_of(groups, judge, batch_size=2)
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/0")
        loop.on_groups([result("training/6/0", [20], [21], [22], [23], [24])])
        await running
        assert judge.calls == [["a", "b"], ["c", "d"], ["e"]]

    play(scenario)


async def _run_with(act: Callable[[TurnLoop], None], judge: Judge, timeout_s: float = TIMEOUT_S) -> None:
    loop, engine = loop_of([[conversation((4,))], [conversation((5,), position=1)]], judge), Engine()
    running = asyncio.create_task(loop.run([engine], None))
    await engine.request("training/6/1")
    act(loop)
    try:
        await loop.ended_groups((), WantedGroups(2), timeout_s)
    finally:
        with suppress(Exception):  # which the wait has raised
            await running


def test_an_environment_call_that_raises_fails_the_rollout_with_its_error() -> None:
    async def raising(turn: Turn) -> Feedback:
        raise KeyError("no such environment")

    with pytest.raises(KeyError, match="no such environment"):
        asyncio.run(_run_with(lambda loop: loop.on_groups([result("training/6/0", [20])]), Judge(raising)))


def test_a_group_of_other_weights_fails_the_rollout() -> None:
    stale = result("training/6/0", [20], version=4)
    with pytest.raises(RuntimeError, match="sampled by policy version 4, not by 5"):
        asyncio.run(_run_with(lambda loop: loop.on_groups([stale]), Judge(right)))


def test_the_deadline_names_the_unfinished_samples_and_who_owes_them() -> None:
    async def never(turn: Turn) -> Feedback:
        await asyncio.Event().wait()
        return Feedback({})

    first = result("training/6/0", [20])
    with pytest.raises(Overdue) as caught:
        asyncio.run(_run_with(lambda loop: loop.on_groups([first]), Judge(never), timeout_s=0.2))
    assert str(caught.value) == (
        "rollout 'training/6' did not end within 0.2 s; missing are, by prompt/sample, "
        "responses 1/0 of engine-0; rewards 0/0 of sums-0"
    )
    assert caught.value.actors == ("engine-0", "sums-0")


def test_a_rollout_ahead_of_its_step_has_no_deadline_before_somebody_waits_for_it() -> None:
    async def scenario() -> None:
        loop, engine = loop_of([[conversation((4,))]], Judge(right)), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/0")
        with pytest.raises(Overdue, match="responses 0/0 of engine-0"):
            await loop.ended_groups((), WantedGroups(1), 0.0)
        with pytest.raises(Overdue):
            await running

    play(scenario)


def test_parts_of_a_rollout_share_one_deadline() -> None:
    async def scenario() -> None:
        loop, engine = (
            loop_of([[conversation((4,))], [conversation((5,), position=1)]], Judge(right)),
            Engine(),
        )
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/1")
        loop.on_groups([result("training/6/0", [20])])
        assert await loop.ended_groups((), WantedGroups(1), 1.0) == [0]
        with pytest.raises(Overdue, match=r"did not end within 1 s"):
            await loop.ended_groups((0,), WantedGroups(1), 1.0)
        with pytest.raises(Overdue):
            await running

    play(scenario)


def test_the_deadline_survives_the_way_between_processes() -> None:
    error = pickle.loads(pickle.dumps(Overdue("too late", ["engine-0"])))
    assert (str(error), error.actors) == ("too late", ("engine-0",))


def test_results_of_another_rollout_are_ignored() -> None:
    async def scenario() -> None:
        loop, engine = loop_of([[conversation((4,))]], Judge(right)), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/0")
        loop.on_groups([result("training/5/0", [33], version=4)])
        loop.on_groups([result("training/6/0", [20])])
        await running

    play(scenario)


def test_a_prompt_that_leaves_no_room_is_refused_with_its_length() -> None:
    sample = conversation((4,) * 10, max_tokens=10)

    async def scenario() -> None:
        await loop_of([[sample]], Judge(right)).run([Engine()], None)

    with pytest.raises(
        ValueError, match="prompt 0 of rollout 'training/6' has 10 tokens, which leaves no room"
    ):
        asyncio.run(scenario())


BAD_IMAGE = Failure(FailureKind.bad_image, "a.png cannot be read")


def test_a_group_whose_images_cannot_be_read_fails_alone() -> None:
    async def scenario() -> None:
        groups = [[conversation(position=i, generation=j) for j in range(2)] for i in range(2)]
        for sample in groups[0]:
            sample.fail(BAD_IMAGE, 5)
        loop, engine = loop_of(groups, Judge(right)), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/1")
        assert list(engine.requests) == ["training/6/1"]
        loop.on_groups([result("training/6/1", [20], [21])])
        await running
        assert [[sample.reward for sample in group] for group in groups] == [[None, None], [1.0, 1.0]]

    play(scenario)


def test_a_rollout_in_which_nothing_can_be_sampled_ends_at_once() -> None:
    async def scenario() -> None:
        sample = conversation()
        sample.fail(BAD_IMAGE, 5)
        await loop_of([[sample]], Judge(right)).run([Engine()], None)

    play(scenario)


def test_requests_bring_the_images_of_their_prompt() -> None:
    async def scenario() -> None:
        group = [replace(conversation(generation=j), prompt_images=(b"png",)) for j in range(2)]
        loop, engine = loop_of([group], Judge(right)), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        request, _ = await engine.request("training/6/0")
        assert request.images == (b"png",)
        loop.on_groups([result("training/6/0", [20], [21])])
        await running

    play(scenario)


def test_later_requests_bring_observed_images_and_one_that_cannot_be_read_fails_its_sample() -> None:
    async def looks(turn: Turn) -> Feedback:
        if len(turn.history) == 2:
            return Feedback({"right": 1.0})
        file = b"gone" if turn.response == "b" else f"{turn.response}.png".encode()
        picture = Picture(file, "the observation, image 1")
        return Feedback(observation="<image>k", images=(picture,), is_done=False)

    async def scenario() -> None:
        group = [
            replace(conversation(generation=j, max_turns=3), prompt_images=(b"p.png",)) for j in range(2)
        ]
        loop, engine = loop_of([group], Judge(looks), max_turns=3), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/0/1/1")
        loop.on_groups([result("training/6/0/0/1", [20]), result("training/6/0/1/1", [21])])
        second, _ = await engine.request("training/6/0/0/2")
        assert (second.images, second.prompt_ids) == ((b"p.png", b"a.png"), (4, 5, 20, 9, 30))
        loop.on_groups([result("training/6/0/0/2", [22])])
        third, _ = await engine.request("training/6/0/0/3")
        assert third.images == (b"p.png", b"a.png", b"c.png")
        loop.on_groups([result("training/6/0/0/3", [23])])
        await running
        good, bad = group
        assert (good.reward, good.failure) == (1.0, None)
        assert bad.failure == Failure(FailureKind.bad_image, "gone.png cannot be read")
        assert (bad.end, bad.num_turns, len(bad.history)) == (EndReason.failed, 1, 0)

    play(scenario)


def test_a_response_of_a_wrong_form_is_flagged_and_loses_its_reward() -> None:
    malformed = MessageFlag.malformed_thinking
    form = ResponseForm(malformed, malformed, [], ["b", "c"])
    group = [conversation(generation=j) for j in range(2)]

    async def scenario() -> None:
        loop, engine = loop_of([group], Judge(right), form=form), Engine()
        running = asyncio.create_task(loop.run([engine], None))
        await engine.request("training/6/0")
        loop.on_groups([result("training/6/0", [20, 21], [21, 20, 22, 23])])  # "ab" and "bacd"
        await running

    play(scenario)
    assert [sample.flags for sample in group] == [[malformed], [NO_FLAG]]
    assert [sample.reward for sample in group] == [0.0, 1.0]
    assert group[0].passages[-1].columns["message_flags"].tolist() == [2, 2]
