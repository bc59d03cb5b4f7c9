from __future__ import annotations

from nemo_like.data.images import Picture
from nemo_like.data.interface import Encoded, Message
from nemo_like.data.messages import conversation_of
from nemo_like.environments.interface import Failure, FailureKind, Feedback
from nemo_like.rollout.message_log import messages_of
from tests.unit.rollout.conversations import conversation, response


def test_a_conversation_of_text_is_prompt_responses_and_observations() -> None:
    sample = conversation(max_turns=2, prompt="how many <image> tags?")
    sample.add_response(response([7]), "<tool>count</tool>", 3)
    sample.add_feedback(Feedback(observation="two", is_done=False))
    sample.add_observation("two", Encoded((20,)))
    sample.add_response(response([8]), "2", 3)
    sample.add_feedback(Feedback({"right": 1.0}))
    assert messages_of(sample, "tool") == [
        {"role": "user", "content": "how many <image> tags?"},
        {"role": "assistant", "content": "<tool>count</tool>"},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "2"},
    ]


def test_messages_of_a_prompt_keep_their_fields_and_a_response_continues_the_last() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    prompt = conversation_of(
        [
            {"role": "user", "content": "1+1?", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "1"},
            {"role": "assistant", "content": "It is"},
        ]
    )
    sample = conversation(prompt=prompt)
    sample.add_response(response([7]), " 2", 3)
    messages = messages_of(sample, "user")
    assert messages == [
        {"role": "user", "content": "1+1?", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
        {"role": "assistant", "content": "It is 2"},
    ]


def test_images_are_parts_of_the_messages_in_which_they_were_seen() -> None:
    prompt = (Message("system", "Look."), Message("user", "<image> or <image>?"))
    pictures = (Picture("/a.png", "data.jsonl:3, image 1"), Picture(b"b", "saved, problem 3, image 2"))
    sample = conversation(max_turns=2, prompt=prompt, images=pictures)
    sample.add_response(response([7]), "zoom", 3)
    sample.add_feedback(Feedback(observation="<image>", is_done=False))
    sample.add_observation("<image>", Encoded((20,), (b"png",)))
    sample.add_response(response([8]), "b", 3)
    assert messages_of(sample, "tool") == [
        {"role": "system", "content": "Look."},
        {
            "role": "user",
            "content": [
                {"type": "image", "path": "/a.png"},
                {"type": "text", "text": " or "},
                {"type": "image", "record": "saved, problem 3, image 2"},
                {"type": "text", "text": "?"},
            ],
        },
        {"role": "assistant", "content": "zoom"},
        {"role": "tool", "content": [{"type": "image", "bytes": b"png"}]},
        {"role": "assistant", "content": "b"},
    ]


def test_a_conversation_that_failed_before_its_first_response_is_its_prompt() -> None:
    sample = conversation(prompt="p")
    sample.fail(Failure(FailureKind.bad_image, "gone"), 3)
    assert messages_of(sample, "user") == [{"role": "user", "content": "p"}]
