"""Lays out the tokens of an agent's session: each token once, after the token that it follows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from nemo_like.batch.columns import MESSAGE_FLAGS, PARENT_GAPS
from nemo_like.batch.forest import ROOT
from nemo_like.generation.interface import FORCED, TOP_LOGPROBS, TOP_TOKEN_IDS
from nemo_like.rollout.agents.agent_session import AgentCall, Step
from nemo_like.rollout.conversation import Passage

# Columns of a response that are for the agent, and not for the trainer.
_OF_CALLS = (FORCED, TOP_TOKEN_IDS, TOP_LOGPROBS)


def laid_out(branches: Sequence[Sequence[Step]]) -> list[Passage]:
    """Return the tokens of a session's branches. The first passage is the first call's prompt.

    A branch begins with tokens that are there already, as far as these are what its calls read: the calls
    before a fork, and what a prompt has in common with another one. The response of a call is always laid out
    by itself, since each generated token trains once. A passage that does not follow the one before it has
    the column parent_gaps.
    """
    layout = _Layout()
    for branch in branches:
        for step in branch:
            layout.add(step)
    return layout.passages


class _Layout:
    """The passages of the calls so far."""

    def __init__(self) -> None:
        self.passages: list[Passage] = []
        self._num_tokens = 0
        self._following: dict[tuple[int, int], int] = {}  # by token and id: a token with this id after it
        self._last_token: dict[int, int] = {}  # of each call, by its number
        self._last_passage: dict[int, int] = {}  # likewise, an index into passages
        self._is_whole: set[int] = set()  # calls whose last tokens have values of tokens that engines read

    def add(self, step: Step) -> None:
        """Add a call's tokens, unless they are there."""
        call = step.call
        if call.number in self._last_token:
            return
        at, num_known = self._known(call)
        read = self._read(call)
        if num_known < len(call.new_ids) or not self.passages:
            ids = np.asarray(call.new_ids[num_known:], np.int32)
            at = self._append(Passage(ids, None, {name: one[num_known:] for name, one in read.items()}), at)
        for passage in _of_response(step):
            at = self._append(passage, at)
        self._last_token[call.number] = at
        self._last_passage[call.number] = len(self.passages) - 1

    def _known(self, call: AgentCall) -> tuple[int, int]:
        """Return the last token that is there of what a call reads, and how many of its new ids are there."""
        at = ROOT if call.parent is None else self._last_token[call.parent.number]
        for number, token_id in enumerate(call.new_ids):
            following = self._following.get((at, token_id))
            if following is None:
                return at, number
            at = following
        return at, len(call.new_ids)

    def _read(self, call: AgentCall) -> dict[str, np.ndarray]:
        """Return the values that came with a response for the call's new tokens, and store the value for the
        last token of the call before it, which the engine read only now."""
        columns = call.response.context_columns
        if call.parent is None:
            return dict(columns)
        number = call.parent.number
        before = self.passages[self._last_passage[number]]
        if number not in self._is_whole:
            self._is_whole.add(number)
            for name, values in columns.items():
                before.columns[name] = np.concatenate([before.columns[name][:-1], values[:1]])
        return {name: values[1:] for name, values in columns.items()}

    def _append(self, passage: Passage, parent: int) -> int:
        """Append a passage after token ``parent``, and return its last token."""
        start, ids = self._num_tokens, passage.token_ids.tolist()
        if gap := start - 1 - parent:
            gaps = np.zeros(len(ids), np.int32)
            gaps[0] = gap
            passage = replace(passage, columns={**passage.columns, PARENT_GAPS.name: gaps})
        self.passages.append(passage)
        self._num_tokens += len(ids)
        for token, token_id in enumerate(ids, start):
            self._following.setdefault((parent, token_id), token)
            parent = token
        return parent


def _of_response(step: Step) -> Iterator[Passage]:
    """Yield the tokens of a response as passages. Tokens that a mask forced are passages of their own without
    log-probs, so they are context, not trained."""
    response = step.call.response
    forced = response.columns.get(FORCED, np.zeros(len(response.token_ids), np.uint8))
    columns = {name: values for name, values in response.columns.items() if name not in _OF_CALLS}
    if step.call.flags:
        columns[MESSAGE_FLAGS.name] = np.full(len(forced), step.call.flags, np.uint8)
    ends = [*(np.flatnonzero(np.diff(forced)) + 1).tolist(), len(forced)]
    for start, end in pairwise([0, *ends]):
        trains = step.trains and not forced[start]
        yield Passage(
            response.token_ids[start:end],
            response.logprobs[start:end] if trains else None,
            {
                name: values[start:end]
                for name, values in columns.items()
                if step.trains or name in response.context_columns
            },
        )
