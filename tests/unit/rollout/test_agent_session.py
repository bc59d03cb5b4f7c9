from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from nemo_like.generation.interface import Response
from nemo_like.rollout.agents.agent_session import (
    AgentCall,
    SessionCalls,
    canonical,
    extended,
    histories,
    without_thoughts,
)

TOOLS = {"tools": [{"name": "add"}]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


class Session:
    """Calls of messages: every text is one token per character, with a 0 at the end of a response."""

    def __init__(self) -> None:
        self.calls = SessionCalls()

    def ask(self, messages: list[dict[str, Any]], answer: str, context: Any = None) -> list[dict[str, Any]]:
        known = histories(context, messages)
        parent, count = self.calls.known(known, messages)
        text = "".join(one["content"] for one in messages[count:])
        ids = np.array([*map(ord, answer), 0], np.int32)
        response = Response(ids, np.zeros(len(ids), np.float32), is_truncated=False)
        history = extended(known[-1], said(answer))
        new = tuple(map(ord, text))
        self.calls.add(parent, (new, text), (response, answer), history=history, policy_version=1)
        return [*messages, said(answer)]

    def branches(self) -> list[list[tuple[int, bool]]]:
        """By branch: the number of each call, and whether it trains there."""
        return [[(step.call.number, step.trains) for step in path] for path in self.calls.branches()]

    def trained(self) -> list[int]:
        return sorted(number for path in self.branches() for number, trains in path if trains)


def text_of(call: AgentCall) -> str:
    return "".join(chr(token) if token else "|" for token in call.token_ids())


def test_a_conversation_that_grows_is_one_branch_whose_tokens_are_continued() -> None:
    session = Session()
    messages = session.ask([user("a")], "x")
    messages = session.ask([*messages, user("b")], "y")
    session.ask([*messages, user("c")], "z")
    assert session.branches() == [[(0, True), (1, True), (2, True)]]
    assert text_of(session.calls.calls[-1]) == "ax|by|cz|"


def test_branches_have_what_they_share_as_context_in_all_but_the_first() -> None:
    session = Session()
    messages = session.ask([user("a")], "x")
    session.ask([*messages, user("b")], "y")
    session.ask([*messages, user("c")], "z")
    assert session.branches() == [[(0, True), (1, True)], [(0, False), (2, True)]]


def test_a_compaction_and_two_sub_agents_are_branches_in_which_each_call_trains_once() -> None:
    session = Session()
    main = session.ask([user("task")], "think")
    for number in range(2):
        sub = session.ask([user(f"help {number}")], "yes")
        session.ask([*sub, user("more")], "no")
        main = session.ask([*main, user(f"result {number}")], "ok")
    session.ask([user("summary")], "end")
    assert session.branches() == [
        [(0, True), (3, True), (6, True)],
        [(1, True), (2, True)],
        [(4, True), (5, True)],
        [(7, True)],
    ]
    assert session.trained() == [*range(8)]


def test_an_edited_history_begins_anew() -> None:
    session = Session()
    messages = session.ask([user("a")], "x")
    session.ask([*messages[:-1], said("changed"), user("b")], "y")
    assert session.branches() == [[(0, True)], [(1, True)]]


def test_other_tools_begin_anew() -> None:
    session = Session()
    messages = session.ask([user("a")], "x", TOOLS)
    session.ask([*messages, user("b")], "y")
    assert len(session.branches()) == 2


@pytest.mark.parametrize(
    "sent_back",
    [
        {"role": "assistant", "content": "x", "refusal": None, "annotations": []},
        {"content": "x", "role": "assistant", "function_call": None, "tool_calls": None},
    ],
)
def test_fields_that_clients_add_do_not_make_another_message(sent_back: dict[str, Any]) -> None:
    session = Session()
    messages = session.ask([user("a")], "x")
    session.ask([*messages[:-1], sent_back, user("b")], "y")
    assert len(session.branches()) == 1


def test_calls_of_tools_are_the_same_whatever_their_ids() -> None:
    def call(name: str) -> dict[str, Any]:
        function = {"name": "add", "arguments": {"a": 1, "b": 2}}
        return said("", tool_calls=[{"id": name, "type": "function", "function": function}])

    assert histories(None, [call("1")]) == histories(None, [call("2")])
    other = json.loads(json.dumps(call("1")))
    other["tool_calls"][0]["function"]["arguments"]["a"] = 3
    assert histories(None, [call("1")]) != histories(None, [other])


def test_the_longest_beginning_of_a_text_is_continued() -> None:
    session = Session()
    session.ask([user("a")], "x")
    call = session.calls.longest(lambda call: "ax and more".startswith(call.whole_text()))
    assert call is session.calls.calls[0]
    assert session.calls.longest(lambda call: "other".startswith(call.whole_text())) is None


THOUGHT = "<think>\n1 and 2\n</think>\n\nIt is 3"


@pytest.mark.parametrize(
    "sent_back",
    [
        said(THOUGHT),
        # As litellm, pydantic-ai and others send it: in a field, with other blanks, in other words, or not.
        said("It is 3", reasoning_content="1 and 2"),
        said("It is 3", reasoning="1 and 2", thinking_blocks=[]),
        said("\n\nIt is 3"),
        said("<think>\n1 and 2\n</think>\nIt is 3\n"),
        said("<thinking>I added.</thinking> It is 3"),
        said("It is 3"),
    ],
)
def test_a_response_continues_whatever_a_client_made_of_its_thoughts(sent_back: dict[str, Any]) -> None:
    session = Session()
    session.ask([user("a")], THOUGHT)
    session.ask([user("a"), sent_back, user("b")], "y")
    assert session.branches() == [[(0, True), (1, True)]]
    assert text_of(session.calls.calls[1]) == f"a{THOUGHT}|by|"


@pytest.mark.parametrize("sent_back", ["It is 4", "It  is 3", "", "1 and 2"])
def test_other_words_are_another_response(sent_back: str) -> None:
    session = Session()
    session.ask([user("a")], THOUGHT)
    session.ask([user("a"), said(sent_back), user("b")], "y")
    assert len(session.branches()) == 2


def test_thoughts_of_others_than_the_assistant_are_texts() -> None:
    assert canonical(user("<think>1</think>2")) != canonical(user("2"))
    assert canonical(user(" 2")) != canonical(user("2"))


def test_of_responses_that_differ_in_their_thoughts_the_one_sent_back_is_continued() -> None:
    session = Session()
    first = session.ask([user("a")], "<think>1</think>3")
    session.ask([user("a")], "<think>2</think>3")
    session.ask([*first, user("b")], "y")
    session.ask([user("a"), said("3"), user("c")], "z")  # without its thoughts: the latest
    assert session.branches() == [[(0, True), (2, True)], [(1, True), (3, True)]]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        (" \n", ""),
        ("3", "3"),
        ("<think>1</think>", ""),
        ("1</think>\n3", "3"),  # the template began the thought
        ("<think>1", "1"),  # cut short: clients leave out the mark at most
        ("one <think>1</think> two <think>2</think>three", "one\n\ntwo\n\nthree"),
        ("<think><think>1</think>3", "3"),
        ("</think></think>3", "3"),
    ],
)
def test_thoughts_are_what_their_marks_enclose(text: str, shown: str) -> None:
    assert without_thoughts(text) == shown


def test_many_marks_take_no_longer_than_their_length() -> None:
    # A search from each mark for its end would take minutes.
    assert without_thoughts("<think>" * 500_000) == ""
    assert without_thoughts("</think>" * 500_000) == ""


def test_arguments_that_utf8_cannot_encode_have_a_history() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "\ud800"}}}
    assert len(histories(None, [said("", tool_calls=[call])])) == 1
