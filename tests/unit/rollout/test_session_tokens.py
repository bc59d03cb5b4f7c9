"""The tokens of agents' sessions: each once, after the token that it follows."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.batch.columns import PARENT_GAPS
from nemo_like.batch.forest import ROOT
from nemo_like.generation.interface import FORCED, Response
from nemo_like.rollout.agents.agent_session import AgentCall, SessionCalls, Step
from nemo_like.rollout.agents.session_tokens import laid_out
from tests.unit.batch.forests import forest_from, path_of


class Session:
    """Calls by their tokens."""

    def __init__(self) -> None:
        self.calls = SessionCalls()

    def ask(
        self,
        parent: AgentCall | None,
        new: tuple[int, ...],
        answer: list[int],
        read: dict[str, np.ndarray] | None = None,
        **columns: Any,
    ) -> AgentCall:
        ids = np.array(answer, np.int32)
        response = Response(ids, -ids.astype(np.float32), False, columns, read or {})
        return self.calls.add(parent, (new, ""), (response, ""), history=None, policy_version=1)

    def laid_out(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens, which of them train, and which token each follows."""
        passages = laid_out(self.calls.branches())
        ids = np.concatenate([one.token_ids for one in passages]).tolist()
        trains = np.concatenate([one.trains for one in passages]).tolist()
        none = [np.zeros(len(one.token_ids), np.int32) for one in passages]
        gaps = [one.columns.get(PARENT_GAPS.name, zero) for one, zero in zip(passages, none, strict=True)]
        return ids, trains, [token - 1 - gap for token, gap in enumerate(np.concatenate(gaps).tolist())]


def test_a_conversation_that_grows_needs_no_gaps() -> None:
    session = Session()
    first = session.ask(None, (1, 2), [3])
    session.ask(first, (4,), [5, 6])
    assert session.laid_out() == ([1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 1], [-1, 0, 1, 2, 3, 4])
    assert all(not passage.columns for passage in laid_out(session.calls.branches()))


def test_two_calls_after_one_have_its_tokens_in_common() -> None:
    session = Session()
    first = session.ask(None, (1, 2), [3])
    session.ask(first, (4,), [5])
    session.ask(first, (4,), [6])  # the same question again: only the response is new
    session.ask(first, (7,), [8])
    ids, trains, parents = session.laid_out()
    assert ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert trains == [0, 0, 1, 0, 1, 1, 0, 1]
    assert parents == [ROOT, 0, 1, 2, 3, 3, 2, 6]


def test_a_compacted_history_begins_with_what_is_left_of_it() -> None:
    """System 1 2, task 3; then the summary 9 in place of the answers. A sub-agent has the system prompt."""
    session = Session()
    first = session.ask(None, (1, 2, 3), [4])
    session.ask(first, (5,), [6])
    session.ask(None, (1, 2, 3, 9), [7])
    session.ask(None, (1, 2, 8), [4])
    ids, trains, parents = session.laid_out()
    assert ids == [1, 2, 3, 4, 5, 6, 9, 7, 8, 4]
    assert trains == [0, 0, 0, 1, 0, 1, 0, 1, 0, 1]
    assert parents == [ROOT, 0, 1, 2, 3, 4, 2, 6, 1, 8]


def test_equal_responses_train_each_by_itself() -> None:
    session = Session()
    session.ask(None, (1,), [2, 3])
    session.ask(None, (1,), [2, 3])
    assert session.laid_out() == ([1, 2, 3, 2, 3], [0, 1, 1, 1, 1], [ROOT, 0, 1, 0, 3])


def test_a_prompt_may_read_what_another_call_generated() -> None:
    session = Session()
    session.ask(None, (1,), [2, 3])
    session.ask(None, (1, 2, 3, 4), [5])
    assert session.laid_out() == ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1], [ROOT, 0, 1, 2, 3])


def test_forced_tokens_are_read_and_a_branch_that_is_left_out_trains_nothing() -> None:
    session = Session()
    first = session.ask(None, (1,), [2, 3, 4], **{FORCED: np.array([0, 1, 0], np.uint8)})
    session.ask(first, (5,), [6])
    session.ask(first, (7,), [8])
    assert session.laid_out()[1] == [0, 1, 0, 1, 0, 1, 0, 1]
    passages = laid_out([session.calls.branches()[1]])
    assert [one.token_ids.tolist() for one in passages] == [[1], [2], [3], [4], [7], [8]]
    assert np.concatenate([one.trains for one in passages]).tolist() == [0, 0, 0, 0, 0, 1]
    assert not any(one.columns for one in passages)


def test_values_of_tokens_that_engines_read_go_to_these_tokens() -> None:
    """An engine has not read the last token of a response; the next call brings its value."""
    name, session = "routes", Session()

    def ask(parent: AgentCall | None, new: tuple[int, ...], read: list[int], sampled: list[int]) -> AgentCall:
        values = {name: np.array(sampled)}
        return session.ask(parent, new, [9] * len(sampled), {name: np.array(read)}, **values)

    first = ask(None, (1, 2), [11, 12], [13, 0])
    ask(first, (3,), [14, 15], [16, 0])
    ask(first, (3, 4), [24, 25, 26], [0])
    passages = laid_out(session.calls.branches())
    assert [one.token_ids.tolist() for one in passages] == [[1, 2], [9, 9], [3], [9, 9], [4], [9]]
    assert [one.columns[name].tolist() for one in passages] == [[11, 12], [13, 14], [15], [16, 0], [26], [0]]


@st.composite
def sessions(draw: st.DrawFn) -> Session:
    """Sessions of few different tokens, so that much is in common."""
    session, tokens = Session(), st.integers(1, 3)
    for _ in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *session.calls.calls]))
        least = 1 if parent is None else 0
        new = tuple(draw(st.lists(tokens, min_size=least, max_size=4)))
        session.ask(parent, new, draw(st.lists(tokens, min_size=1, max_size=3)))
    return session


@given(sessions())
def test_every_call_reads_its_own_tokens_and_each_generated_token_trains_once(session: Session) -> None:
    ids, trains, parents = session.laid_out()
    forest_from(parents)
    texts = {tuple(ids[one] for one in path_of(token, parents)) for token in range(len(ids))}
    assert {call.token_ids() for call in session.calls.calls} <= texts
    assert sum(trains) == sum(len(call.response.token_ids) for call in session.calls.calls)
    read = [token for token, one in enumerate(trains) if not one]
    after = [(parents[token], ids[token]) for token in read]
    assert len(set(after)) == len(after), "a token that is only read is there twice"


def test_steps_of_one_call_in_several_branches_are_laid_out_once() -> None:
    session = Session()
    first = session.ask(None, (1,), [2])
    passages = laid_out([[Step(first, trains=True)], [Step(first, trains=False)]])
    assert [one.token_ids.tolist() for one in passages] == [[1], [2]]
