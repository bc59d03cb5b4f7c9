from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_like.algorithms.message_flags import NO_FLAG, MessageFlag
from nemo_like.batch.columns import MESSAGE_FLAGS
from nemo_like.data.interface import Encoded, Message
from nemo_like.environments.interface import Exchange, FailureKind, Feedback
from nemo_like.rollout.conversation import Conversation, EndReason
from nemo_like.rollout.flatten import sample_value
from tests.unit.rollout.conversations import conversation, response, routed

BOTH = MessageFlag.invalid_tool_call | MessageFlag.malformed_thinking
GO_ON = Feedback({"step": 0.25}, observation="go on", is_done=False, state={"moves": 1})


def answered(sample: Conversation, feedback: Feedback, *, is_truncated: bool = False) -> Conversation:
    sample.add_response(response([7, 8], is_truncated=is_truncated), "said", 3)
    sample.add_feedback(feedback)
    return sample


def test_a_done_feedback_ends_the_conversation() -> None:
    sample = answered(conversation(), Feedback({"right": 1.0}))
    assert sample.end is EndReason.done
    assert sample.reward == 1.0
    assert not sample.is_truncated


def test_what_was_said_is_text_after_a_text_and_messages_after_messages() -> None:
    text = answered(conversation(max_turns=2), GO_ON)
    text.add_observation(" go on ", Encoded((20,)))
    assert text.said("tool") == "psaid go on "
    messages = (Message("system", "be brief"), Message("user", "p"))
    chat = answered(conversation(max_turns=2, prompt=messages), GO_ON)
    assert chat.said("tool") == messages
    chat.add_observation("go on", Encoded((20,)))
    assert chat.said("tool") == (*messages, Message("assistant", "said"), Message("tool", "go on"))
    begun = answered(conversation(max_turns=2, prompt=(*messages, Message("assistant", "I "))), GO_ON)
    begun.add_observation("go on", Encoded((20,)))
    assert begun.turn().prompt == (*messages, Message("assistant", "I "))
    assert begun.said("tool") == (*messages, Message("assistant", "I said"), Message("tool", "go on"))


def test_an_observation_leads_to_the_next_turn_whose_prompt_is_everything_so_far() -> None:
    sample = answered(conversation((4, 5), max_turns=2), GO_ON)
    assert sample.end is None
    sample.add_observation("go on", Encoded((20, 21)))
    assert sample.token_ids() == (4, 5, 7, 8, 20, 21)
    sample.add_response(response([9]), "more", 3)
    turn = sample.turn()
    assert turn.history == (Exchange("said", "go on"),)
    assert turn.response == "more"
    assert turn.state == {"moves": 1}
    assert turn.is_last
    assert sample.transcript() == "\n[assistant] said\n[environment] go on\n[assistant] more"


def test_rewards_of_the_turns_add_up_by_name() -> None:
    sample = answered(conversation(max_turns=3), GO_ON)
    sample.add_observation("go on", Encoded((20,)))
    answered(sample, GO_ON)
    sample.add_observation("go on", Encoded((20,)))
    answered(sample, Feedback({"step": 0.25, "right": 1.0}))
    assert sample.rewards == {"step": 0.75, "right": 1.0}
    assert sample.reward == 1.75


def test_the_turn_limit_ends_a_conversation_that_is_not_done() -> None:
    sample = answered(conversation(max_turns=1), GO_ON)
    assert sample.end is EndReason.turn_limit
    assert sample.reward == 0.25
    assert not sample.is_truncated


def test_a_truncated_response_is_the_last_one() -> None:
    sample = conversation(max_turns=5)
    sample.add_response(response([7, 8], is_truncated=True), "said", 3)
    assert sample.turn().is_last
    sample.add_feedback(GO_ON)
    assert sample.end is EndReason.token_limit
    assert sample.is_truncated


@pytest.mark.parametrize(("num_observed", "end"), [(5, None), (6, EndReason.token_limit)])
def test_an_observation_must_leave_room_for_a_response(num_observed: int, end: EndReason | None) -> None:
    # 2 prompt tokens and 2 of the response leave 6 of 10.
    sample = answered(conversation((4, 5), max_turns=5, max_tokens=10), GO_ON)
    sample.add_observation("go on", Encoded((20,) * num_observed))
    assert sample.end is end
    assert sample.num_tokens == (9 if end is None else 4)
    assert sample.is_truncated == (end is not None)


def test_a_failure_in_any_turn_costs_the_whole_reward() -> None:
    sample = answered(conversation(max_turns=2), GO_ON)
    sample.add_observation("go on", Encoded((20,)))
    answered(sample, Feedback.failed(FailureKind.timed_out, "too slow"))
    assert sample.end is EndReason.failed
    assert sample.reward is None
    assert sample.failure is not None
    assert sample.failure.kind is FailureKind.timed_out


def test_known_are_all_tokens_before_the_last_one_that_was_sampled() -> None:
    sample = conversation((4, 5, 6), max_turns=3)
    assert sample.num_known == 0
    sample.add_response(response([7, 8]), "said", 3)
    assert sample.num_known == 4  # 4, 5, 6, 7; token 8 was sampled and not read
    sample.add_feedback(GO_ON)
    sample.add_observation("go on", Encoded((20, 21, 22)))
    assert sample.num_known == 4


def test_what_an_engine_gives_for_tokens_that_it_read_goes_to_their_passages() -> None:
    sample = conversation((4, 5), max_turns=2)
    sample.add_response(routed([7, 8], routes=[31, 0], context=[11, 12]), "said", 3)
    sample.add_feedback(GO_ON)
    sample.add_observation("go on", Encoded((20, 21)))
    sample.add_response(routed([9], routes=[0], context=[32, 41, 42]), "more", 3)
    assert sample.own_prompt(sample.prompt_passage).columns["routes"].tolist() == [11, 12]
    assert [one.columns["routes"].tolist() for one in sample.passages] == [[31, 32], [41, 42], [0]]
    assert conversation().own_prompt(sample.prompt_passage).columns == {}


def test_a_response_in_pieces_is_one_passage_with_what_the_engine_gave_for_each_token() -> None:
    sample = conversation((4, 5))
    sample.begin_response(replace(routed([6, 7], routes=[1, 0], context=[8, 9]), is_truncated=True), 2)
    assert (sample.num_tokens, sample.num_known, sample.num_response_tokens) == (4, 3, 2)
    assert sample.token_ids() == (4, 5, 6, 7)
    # The engine reads token 7 only now, and gives 3 for it.
    rest = sample.with_begun(routed([8, 1], routes=[4, 0], context=[3]))
    sample.add_response(rest, "text", 1)
    (passage,) = sample.passages
    assert passage.token_ids.tolist() == [6, 7, 8, 1]
    assert passage.columns["routes"].tolist() == [1, 3, 4, 0]
    assert sample.prompt_columns["routes"].tolist() == [8, 9]
    assert (sample.num_turns, sample.policy_version, sample.is_truncated) == (1, 1, False)
    assert sample.num_known == 5


SILENT = Feedback({"right": None}, observation="go on", is_done=False)
NOT_JUDGED = Feedback.failed(FailureKind.abstained, "the reward is None (right)")


def test_what_earlier_turns_earned_stays_where_everything_abstains_from_the_last() -> None:
    sample = conversation((4, 5), max_turns=2)
    sample.add_response(response([7, 1]), "said", 3)
    sample.add_feedback(Feedback({"right": 0.5}, observation="go on", is_done=False))
    sample.add_observation("go on", Encoded((20,)))
    sample.add_response(response([8, 1]), "more", 3)
    sample.add_feedback(NOT_JUDGED)
    assert (sample.end, sample.failure, sample.reward) == (EndReason.done, None, 0.5)


@pytest.mark.parametrize("limit", [{"max_turns": 1}, {"max_tokens": 4}, {"max_turns": 2, "max_tokens": 6}])
def test_a_sample_that_ends_at_a_limit_and_was_judged_in_no_turn_has_no_reward(limit: dict[str, int]) -> None:
    sample = conversation((4, 5), **limit)
    sample.add_response(response([7, 1]), "said", 3)
    sample.add_feedback(SILENT)
    if sample.end is None:
        sample.add_observation("go on", Encoded((20, 21)))
    assert (sample.end, sample.reward) == (EndReason.failed, None)
    assert sample.failure is not None
    assert sample.failure.kind is FailureKind.abstained
    assert "None in every turn (right)" in sample.failure.reason


def test_flags_are_on_the_tokens_of_their_response_and_in_the_metrics() -> None:
    sample = conversation(max_turns=2)
    sample.add_response(response([7, 8]), "<think>", 3)
    sample.flag_response(MessageFlag.malformed_thinking, BOTH)
    sample.add_feedback(GO_ON)
    sample.add_observation("go on", Encoded((20,)))
    sample.add_response(response([9]), "more", 3)
    sample.flag_response(NO_FLAG, BOTH)
    sample.add_feedback(Feedback({"right": 1.0}))
    values = sample_value(MESSAGE_FLAGS, [sample.prompt_passage, *sample.passages])
    assert values.tolist() == [0, 0, 2, 2, 0, 0]
    assert sample.metric_sums == {"invalid_tool_call_share": 0.0, "malformed_thinking_share": 1.0}
    assert sample.metric_counts == {"invalid_tool_call_share": 2.0, "malformed_thinking_share": 2.0}


@pytest.mark.parametrize(
    ("flags", "unrewarded", "reward"),
    [
        ([NO_FLAG, NO_FLAG], BOTH, 1.25),
        ([MessageFlag.malformed_thinking, NO_FLAG], BOTH, 0.0),
        ([MessageFlag.malformed_thinking, NO_FLAG], MessageFlag.invalid_tool_call, 1.25),
        ([MessageFlag.empty_answer, NO_FLAG], MessageFlag.empty_answer, 1.25),
        ([NO_FLAG, MessageFlag.empty_answer], MessageFlag.empty_answer, 0.0),
    ],
)
def test_a_flag_of_a_response_takes_the_reward_of_all(
    flags: list[MessageFlag], unrewarded: MessageFlag, reward: float
) -> None:
    sample = answered(conversation(max_turns=3), GO_ON)
    sample.add_observation("go on", Encoded((20,)))
    answered(sample, Feedback({"right": 1.0}))
    sample.count_flags(flags, BOTH)
    sample.withhold_reward(unrewarded)
    assert sample.reward == reward
    assert list(sample.rewards) == ["step", "right"]
