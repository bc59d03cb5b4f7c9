"""What a response calls, by a tool parser that finds what a test says."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.rollout.agents.agent_request import BadRequest
from nemo_like.rollout.agents.agent_responses_api import as_chat as responses_as_chat
from nemo_like.rollout.agents.agent_tools import ParsedText, ToolUse, narrowed, parsed

TEXT = "what the policy wrote"


def use(*calls: tuple[str, str], content: str | None = None, **request: Any) -> ToolUse:
    """Tools of a parser that finds these calls in any text."""
    found = [SimpleNamespace(function=SimpleNamespace(name=name, arguments=own)) for name, own in calls]
    parser = SimpleNamespace(
        extract_tool_calls=lambda text, request: SimpleNamespace(tool_calls=found, content=content),
        supports_required_and_named=True,
    )
    return ToolUse(parser, SimpleNamespace(**{"tool_choice": "auto", **request}), None)


@pytest.mark.parametrize(
    "arguments", ["[1, 2]", '"1"', "3", "null", '{"a": 1', '{"a": NaN}', '{"a": 1e999}', "", "[" * 5000]
)
def test_a_call_whose_arguments_are_no_object_is_text(arguments: str) -> None:
    assert parsed(TEXT, use(("add", "{}"), ("add", arguments))) == ParsedText(TEXT)
    named = SimpleNamespace(function=SimpleNamespace(name="add"))
    assert parsed(arguments, use(tool_choice=named)) == ParsedText(arguments)


@pytest.mark.parametrize(
    "text", ['[{"name": "add", "parameters": [1]}]', '[{"name": "add"', "[" * 5000, "{}"]
)
def test_a_list_of_calls_that_is_cut_short_or_has_other_arguments_is_text(text: str) -> None:
    assert parsed(text, use(tool_choice="required")) == ParsedText(text)


def test_calls_are_read_with_what_is_said_beside_them() -> None:
    assert parsed(TEXT, use(("add", '{"a": 1}'), content="So:")) == ParsedText("So:", (("add", '{"a": 1}'),))
    text = '[{"name": "add", "parameters": {"a": 1}}]'
    assert parsed(text, use(tool_choice="required")) == ParsedText(None, (("add", '{"a": 1}'),))


@pytest.mark.parametrize("blanks", ["", " ", "\n\n"])
def test_blanks_beside_a_call_are_not_sent(blanks: str) -> None:
    assert parsed(TEXT, use(("add", "{}"), content=blanks)).content is None
    assert parsed(blanks, use(content=blanks)).content == blanks  # without a call they are what was said


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


def allowing(mode: Any, *names: str) -> dict[str, Any]:
    named = [{"type": "function", "function": {"name": name}} for name in names]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    return {"tools": [tool("add"), tool("multiply"), tool("divide")], "tool_choice": choice}


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_some_of_the_tools_may_be_called(mode: str) -> None:
    own, allowed = narrowed(allowing(mode, "add", "divide"))
    assert own == {"tools": [tool("add"), tool("divide")], "tool_choice": mode}
    assert allowed == {"add", "divide"}


def test_another_choice_leaves_the_tools_as_they_are() -> None:
    own = {"tools": [tool("add")], "tool_choice": "auto"}
    assert narrowed(own) == (own, None)


@pytest.mark.parametrize(
    "wrong", [allowing("none", "add"), allowing("auto"), allowing("auto", "subtract"), allowing([], "add")]
)
def test_what_allows_none_of_the_tools_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="add, divide, multiply"):
        narrowed(wrong)


def test_a_call_that_is_not_allowed_is_text() -> None:
    both = use(("add", "{}"), ("multiply", "{}"))
    assert len(parsed(TEXT, both).calls) == 2
    assert parsed(TEXT, replace(both, allowed=frozenset({"add"}))) == ParsedText(TEXT)


def test_the_api_of_responses_allows_tools_in_its_own_form() -> None:
    named = [{"type": "function", "name": "add"}]
    own = {"type": "function", "name": "add", "parameters": {"type": "object"}}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": named}
    chat = responses_as_chat({"input": "1", "tools": [own], "tool_choice": choice}, {})
    assert narrowed(chat)[1] == {"add"}
