"""What a response calls, by a tool parser that finds what a test says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.rollout.agent_tools import ParsedText, ToolUse, parsed

TEXT = "what the policy wrote"


def use(*calls: tuple[str, str], content: str | None = None, **request: Any) -> ToolUse:
    """Tools of a parser that finds these calls in any text."""
    found = [SimpleNamespace(function=SimpleNamespace(name=name, arguments=own)) for name, own in calls]
    parser = SimpleNamespace(
        extract_tool_calls=lambda text, request: SimpleNamespace(tool_calls=found, content=content),
        supports_required_and_named=True,
    )
    return ToolUse(parser, SimpleNamespace(**{"tool_choice": "auto", **request}), None)


@pytest.mark.parametrize("arguments", ["[1, 2]", '"1"', "3", "null", '{"a": 1', "", "[" * 5000])
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
