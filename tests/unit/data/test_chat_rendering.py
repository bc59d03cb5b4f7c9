"""Templates as real ones are: what they read of messages, and how they want calls of tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_like.data.chat_rendering import ChatRendering
from nemo_like.data.interface import Message
from nemo_like.data.messages import BadMessage, conversation_of
from scripts.demo_model.tool_tokenizer import TEMPLATE, tool_tokenizer

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "1+2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "3"},
]
# Writes every field that messages have here, and calls by the expression CALL.
ALL_FIELDS = (
    "{% for m in messages %}[{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}]"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
AS_MAPPING = "{{ c.function.name }}({{ c.function.arguments | tojson }})"
AS_TEXT = "{{ c.function.name + '(' + c.function.arguments + ')' }}"
UNQUOTED = "{{ c.function.name }}({{ c.function.arguments }})"
# As DeepSeek's first one: calls are written only where the content is null.
WHERE_NULL = (
    "{% for m in messages %}{% if m.content is none %}"
    "{% for c in m.tool_calls %}" + AS_TEXT + "{% endfor %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
)
NO_CALLS = "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
NO_TOOLS_ROLE = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}{{ m.content }}{{ m.tool_calls }};"
    "{% endif %}{% endfor %}"
)


def rendering(template: str) -> ChatRendering:
    tokenizer = tool_tokenizer()
    tokenizer.chat_template = template
    return ChatRendering(tokenizer, "data.chat_template")


def rendered(template: str, *messages: dict[str, Any]) -> str:
    return rendering(template).checked_prompt(conversation_of(messages), ())


@pytest.mark.parametrize("call", [AS_MAPPING, AS_TEXT, UNQUOTED])
@pytest.mark.parametrize("arguments", ['{"a": 1, "b": 2}', {"a": 1, "b": 2}])
def test_calls_are_written_as_json_whether_template_and_record_have_text_or_mappings(
    call: str, arguments: object
) -> None:
    messages = [*ASKED]
    messages[1] = {**ASKED[1], "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]}
    assert rendered(ALL_FIELDS.replace("CALL", call), *messages) == (
        '[user]1+2?;[assistant]add({"a": 1, "b": 2});[tool add]3;[assistant]'
    )


def test_a_template_that_writes_calls_where_the_content_is_null_gets_null() -> None:
    assert rendered(WHERE_NULL, *ASKED) == '1+2?;add({"a": 1, "b": 2});3;'


def test_names_and_reasoning_reach_the_template() -> None:
    said = {"role": "assistant", "content": "3", "reasoning_content": "1 and 2"}
    more = {"role": "user", "content": "2+2?", "name": "ann"}
    assert rendered(ALL_FIELDS.replace("CALL", AS_MAPPING), ASKED[0], said, more) == (
        "[user]1+2?;[assistant]<think>1 and 2</think>3;[user ann]2+2?;[assistant]"
    )


@pytest.mark.parametrize(
    ("template", "named"),
    [
        (NO_CALLS, r"leaves out the call of 'add' of message 2 \(role 'assistant'\), .* data.chat_template"),
        (NO_TOOLS_ROLE, r"leaves out the content of message 3 \(role 'tool'\)"),
        (
            ALL_FIELDS.replace("CALL", "{{ c.function.name }}"),
            r"leaves out the call of 'add' of message 2",
        ),
        (
            "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
            "{% endfor %}",
            "the chat template refuses the messages: no tools",
        ),
    ],
)
def test_a_template_that_loses_a_call_or_a_result_is_refused(template: str, named: str) -> None:
    with pytest.raises(BadMessage, match=named):
        rendered(template, *ASKED)


def test_a_second_call_that_is_lost_is_found() -> None:
    only_first = ALL_FIELDS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]").replace("CALL", AS_TEXT)
    other = {"function": {"name": "sub", "arguments": "{}"}}
    messages = [ASKED[0], {**ASKED[1], "tool_calls": [CALL, other]}, ASKED[2]]
    with pytest.raises(BadMessage, match="the call of 'sub'"):
        rendered(only_first, *messages)


def test_a_system_message_that_the_template_leaves_out_is_refused() -> None:
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}"
    with pytest.raises(BadMessage, match=r"the content of message 1 \(role 'system'\)"):
        rendered(template, {"role": "system", "content": "Be brief."}, ASKED[0])


def test_reasoning_of_earlier_turns_may_be_left_out_and_is_told() -> None:
    without = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1] }}"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    chat = rendering(without)
    said = Message("assistant", "<think>1 and 2</think>3", {"reasoning_content": "x", "tool_call_id": "1"})
    assert chat.checked_prompt((Message("user", "1+2?"), said, Message("user", "!")), ()) == "1+2?;3;!;"
    assert chat.unread_fields == {"reasoning_content"}


def test_tools_that_the_template_does_not_describe_are_told() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    for template, unread in ((TEMPLATE, {"tools"}), ("{{ tools | tojson }}" + TEMPLATE, set())):
        chat = rendering(template)
        chat.checked_prompt((Message("user", "1+2?"),), tools)
        assert chat.unread_fields == unread


def test_a_template_that_fails_without_text_reads_the_text_only_where_it_writes_it() -> None:
    of_parts = "{% for m in messages %}{{ m.content[0].type }}{{ m.content[0].text }};{% endfor %}"
    with pytest.raises(BadMessage, match=r"the content of message 1 \(role 'user'\)"):
        rendered(of_parts, ASKED[0])


def test_each_kind_of_message_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    chat = rendering(TEMPLATE)
    counts = []
    for text in ("1", "2"):
        calls: list[Any] = []
        render = chat.render
        monkeypatch.setattr(
            chat, "render", lambda *a, render=render, calls=calls, **k: (calls.append(a), render(*a, **k))[1]
        )
        chat.checked_prompt((Message("system", text), Message("user", text)), ())
        counts.append(len(calls))
    assert counts == [3, 1]  # with each of the two messages emptied


def test_a_prompt_that_ends_in_the_assistants_message_is_continued() -> None:
    begun = [ASKED[0], {"role": "assistant", "content": "It is"}]
    assert rendered(TEMPLATE, *begun) == "? 1+2?\n> It is"
    assert rendered(TEMPLATE, ASKED[0]) == "? 1+2?\n> "


def test_a_beginning_that_the_template_leaves_out_is_refused() -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }};{% endfor %}"
    with pytest.raises(BadMessage, match=r"the chat template refuses the messages: .*does not appear"):
        rendered(template, ASKED[0], {"role": "assistant", "content": "It is"})


def test_a_whole_conversation_is_checked_too() -> None:
    said = (Message("user", "1+2?"), Message("assistant", "3"))
    assert rendering(TEMPLATE).checked_conversation(said) == "? 1+2?\n> 3<eos>\n"
    with pytest.raises(BadMessage, match="the call of 'add' of message 2"):
        rendering(NO_CALLS).checked_conversation(conversation_of(ASKED))


def test_the_tokens_of_a_prompt_have_its_calls(tmp_path: Path) -> None:
    from nemo_like.data.tokenizer import Tokenizer

    tool_tokenizer().save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    text = tokenizer.decode(tokenizer.encode_prompt(conversation_of(ASKED)))
    assert text == (
        '? 1+2?\n> <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><eos>\n= 3\n> '
    )
