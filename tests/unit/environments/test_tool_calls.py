from __future__ import annotations

import re

import pytest

from nemo_like.environments.tool_calls import UnreadableCall, read_call, without_calls


def test_a_call_has_a_name_and_perhaps_arguments() -> None:
    assert read_call('{"name": "add", "arguments": {"x": 1}}') == ("add", {"x": 1})
    assert read_call('{"name": "now"}') == ("now", {})
    assert read_call('{"name": "now", "arguments": null}') == ("now", {})


@pytest.mark.parametrize(
    "text", ["", "add", "[]", "{}", '{"name": 1}', '{"name": "add", "arguments": [1]}', '{"name": "\\ud800"']
)
def test_other_text_is_no_call(text: str) -> None:
    with pytest.raises(UnreadableCall):
        read_call(text)


def test_what_is_left_of_a_text_has_the_calls_that_cannot_be_read() -> None:
    pattern = re.compile("<(.*?)>")
    assert without_calls('a<{"name": "add"}>b<{}>c', pattern) == ("ab<{}>c", 1)
    assert without_calls("none", pattern) == ("none", 0)
