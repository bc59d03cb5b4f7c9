"""What a chat template writes between two responses, with templates that do what some do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.data.template_turns import (
    TurnEnds,
    TurnError,
    after_mark,
    after_response,
    between_responses,
    check_role,
    is_written,
    rendered_roles,
    turn_end,
    unused_mark,
    without_end,
)

Messages = Sequence[Mapping[str, Any]]


def chat(messages: Messages, *, add_generation_prompt: bool) -> str:
    said = "".join(f"<{one['role']}>{one['content']}</>\n" for one in messages)
    return said + ("<assistant>" if add_generation_prompt else "")


def test_an_observation_is_between_the_end_of_a_turn_and_the_next_response() -> None:
    assert between_responses(chat, "42", "tool") == "</>\n<tool>42</>\n<assistant>"
    assert turn_end(chat) == "</>\n"
    assert rendered_roles(chat) == ["user", "tool", "system"]


def test_a_text_that_has_the_mark_itself_is_no_mark() -> None:
    text = f"{unused_mark()} and {unused_mark()}"
    assert between_responses(chat, text, "tool") == f"</>\n<tool>{text}</>\n<assistant>"


@pytest.mark.parametrize(
    ("rendered", "told"),
    [("<user>?", "leaves out the text of a response"), ("m m", "writes the text of a response 2 times")],
)
def test_a_mark_that_is_not_there_once_is_told(rendered: str, told: str) -> None:
    with pytest.raises(TurnError, match=told):
        after_mark(rendered, "m")


def test_a_template_that_writes_a_response_twice_is_refused() -> None:
    def twice(messages: Messages, *, add_generation_prompt: bool) -> str:
        return chat([*messages, *messages], add_generation_prompt=add_generation_prompt)

    with pytest.raises(TurnError, match="writes the text of a response 2 times"):
        between_responses(twice, "42", "user")


def after_calls(messages: Messages, *, add_generation_prompt: bool) -> str:
    """As Mistral's: a result has the id of a call, of nine characters, and user and assistant alternate."""
    written = ""
    for one, before in zip(messages, [{}, *messages], strict=False):
        if one["role"] == "tool":
            if len(one.get("tool_call_id", "")) != 9 or not before.get("tool_calls"):
                raise ValueError("a result needs a call with an id of nine characters")
            written += f"[{one['tool_call_id']}: {one['content']}]"
        elif one.get("tool_calls"):
            written += f"[calls {one['tool_calls'][0]['function']['name']}]</s>"
        else:
            written += f"({one['content']})</s>"
    return written


def test_a_result_that_needs_a_call_gets_one_which_is_not_in_the_text() -> None:
    assert between_responses(after_calls, "42", "tool") == ")</s>[call00001: 42]"


def test_a_result_that_needs_the_name_of_the_function_is_refused_with_what_works() -> None:
    def named(messages: Messages, *, add_generation_prompt: bool) -> str:
        if messages[-1]["role"] == "tool":
            name = messages[-2]["tool_calls"][0]["function"]["name"]
            return f"{named(messages[:-1], add_generation_prompt=False)}{name} gave {messages[-1]['content']}"
        return chat(messages, add_generation_prompt=add_generation_prompt)

    told = "refuses a conversation of user, assistant, tool .*; it renders .* of the role user and system"
    with pytest.raises(TurnError, match=told):
        check_role(named, "tool")
    known = [{"role": "user", "content": "?"}, _calling("add")]
    added = after_response(named, known, [{"role": "tool", "content": "42"}])
    assert added == "</>\nadd gave 42"


def _calling(name: str) -> dict[str, Any]:
    function = {"name": name, "arguments": {}}
    call = {"id": "123456789", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def test_what_a_template_refuses_of_earlier_turns_does_not_keep_it_from_later_ones() -> None:
    def strict(messages: Messages, *, add_generation_prompt: bool) -> str:
        if any("<analysis>" in one["content"] for one in messages):
            raise ValueError("no tags in the content")
        return chat(messages, add_generation_prompt=add_generation_prompt)

    said = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "<analysis>"}]
    added = after_response(strict, [*said, *said], [{"role": "user", "content": "more"}])
    assert added == "</>\n<user>more</>\n<assistant>"


@pytest.mark.parametrize(
    ("text", "rendered", "is_there"),
    [
        ("seven of 9", "<seven>, of\n9", True),
        ('a "b"\nc', r'"a \"b\"\nc"', True),  # as JSON
        ("  42 \n", "42", True),  # stripped
        ("seven of 9", "9 of seven", False),
        ("42", "", False),
        ("", "", True),
        ("→ …", "<→ …>", True),
        ("→ …", "<>", False),
    ],
)
def test_a_text_is_written_when_its_words_are_there_in_order(
    text: str, rendered: str, is_there: bool
) -> None:
    assert is_written(text, rendered) is is_there


@given(st.text(), st.text(), st.text())
def test_a_text_that_is_written_as_it_is_is_found(before: str, text: str, after: str) -> None:
    assert is_written(text, before + text + after)


QWEN = TurnEnds(
    "<|im_end|>\n", ["<|im_end|>", "<|endoftext|>"], ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
)
HARMONY = TurnEnds(
    "<|return|>", ["<|return|>", "<|call|>"], ["<|return|>", "<|call|>", "<|end|>", "<|start|>"]
)
GLM = TurnEnds("<|", ["<|user|>", "<|observation|>"], ["<|user|>", "<|observation|>", "<|assistant|>"])
LLAMA2 = TurnEnds(" </s>", ["</s>"], ["<s>", "</s>"])
COHERE = TurnEnds("<|END_RESPONSE|><|END|>", ["<|END|>"], ["<|END_RESPONSE|>", "<|END|>", "<|START|>"])


@pytest.mark.parametrize(
    ("ends", "ended_by", "text", "rest"),
    [
        (QWEN, "<|im_end|>", "<|im_end|>\n<|im_start|>user", "\n<|im_start|>user"),
        # Another end than the template's takes its place ...
        (QWEN, "<|endoftext|>", "<|im_end|>\n<|im_start|>user", "\n<|im_start|>user"),
        # ... also where the template ends the last turn differently from earlier ones.
        (HARMONY, "<|return|>", "<|end|><|start|>user", "<|start|>user"),
        (HARMONY, "<|call|>", "<|end|><|start|>user", "<|start|>user"),
        # Responses of this family end with the header of what follows, which may be another one.
        (GLM, "<|observation|>", "<|observation|>\n42", "\n42"),
        (GLM, "<|user|>", "<|observation|>\n42", "<|observation|>\n42"),
        (LLAMA2, "</s>", " </s><s>[INST] 42", "<s>[INST] 42"),
        (COHERE, "<|END|>", "<|END_RESPONSE|><|END|><|START|>42", "<|START|>42"),
    ],
)
def test_the_end_of_a_turn_is_there_once(ends: TurnEnds, ended_by: str, text: str, rest: str) -> None:
    assert without_end(text, ended_by, ends) == rest


def test_an_end_that_only_stands_between_turns_is_found_by_what_may_follow() -> None:
    def between(messages: Messages, *, add_generation_prompt: bool) -> str:
        turns = "</>".join(f"<{one['role']}>{one['content']}" for one in messages)
        return turns + ("</><assistant>" if add_generation_prompt else "")

    assert turn_end(between) == "</><"
    ends = TurnEnds(turn_end(between), ["</>", "<eos>"], ["</>", "<eos>"])
    assert without_end(between_responses(between, "42", "tool"), "<eos>", ends) == "<tool>42</><assistant>"
