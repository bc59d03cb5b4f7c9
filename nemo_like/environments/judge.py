"""Rewards by a generative judge, a model behind any OpenAI-compatible API.

    judge        question about the response           ──▶ verdict  ──▶ score   ──▶ reward from 0 to 1
    preference   question about response and reference ──▶ verdicts ──▶ winners ──▶ share of wins
                 answer, in both orders

Pairs are asked about in both orders because judges favour the first or the second answer (arXiv 2306.05685).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence

import openai

from nemo_like.data.interface import Prompt
from nemo_like.data.messages import as_text
from nemo_like.environments.feedback import encodable
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.kind import RecordCheck
from nemo_like.environments.kinds.judge import JudgeOptions
from nemo_like.environments.kinds.preference import PreferenceOptions
from nemo_like.environments.per_turn import extract_answer, raised
from nemo_like.environments.record_needs import answer, needs_nothing
from nemo_like.environments.shared_options import EndpointOptions

_MAX_SHOWN_CHARACTERS = 300  # of a verdict, and of a server's answer
# The key for a server that asks for none; without it the client would look for one in the environment.
_NO_KEY = "none"
# The share of a comparison that the answer named first wins, by verdict.
_WON_BY_FIRST = {"A": 1.0, "B": 0.0, "C": 0.5}


class NoVerdict(Exception):
    """The judge gave no verdict, or one that cannot be read; ``kind`` says which."""

    def __init__(self, kind: FailureKind, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind


class JudgeEnvironment:
    """Asks a judge about all turns of a call side by side."""

    def __init__(self, judge: Callable[[Turn], Awaitable[Feedback]], default_reward: float | None) -> None:
        """Get the feedback of each turn from ``judge``. When a verdict cannot be read, the reward is
        ``default_reward``, or the sample fails when that is None."""
        self._judge, self._default_reward = judge, default_reward

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order. The metric ``has_verdict`` is 0 for a default reward."""
        return list(await asyncio.gather(*(self._judged(turn) for turn in turns)))

    async def _judged(self, turn: Turn) -> Feedback:
        try:
            return await self._judge(turn)
        except NoVerdict as error:
            if error.kind is FailureKind.malformed and self._default_reward is not None:
                return Feedback({"judge": self._default_reward}, metrics={"has_verdict": 0.0})
            return Feedback.failed(error.kind, str(error))
        except Exception as error:
            return raised(error)


def judge(options: JudgeOptions) -> JudgeEnvironment:
    """Make an environment whose reward is the judge's score, mapped linearly so that ``min_score`` gives 0
    and ``max_score`` gives 1.

    Raises ValueError when the environment variable with the API key is not set.
    """
    endpoint = JudgeEndpoint(options)

    async def judged(turn: Turn) -> Feedback:
        values = {"prompt": prompt_text(turn.prompt), "response": turn.response, "answer": turn.answer}
        verdict = await endpoint.verdict(filled(options.prompt, values))
        return Feedback({"judge": reward_of(verdict, options)}, metrics={"has_verdict": 1.0})

    return JudgeEnvironment(judged, options.default_reward)


def preference(options: PreferenceOptions) -> JudgeEnvironment:
    """Make an environment whose reward is the share that the response wins against the reference answer, over
    both orders; a tie is half a win. The metric ``is_consistent`` is 1 when both orders agree.

    Raises ValueError when the environment variable with the API key is not set.
    """
    endpoint = JudgeEndpoint(options)

    async def won_by_first(turn: Turn, first: str, second: str) -> float:
        values = {"prompt": prompt_text(turn.prompt), "first": first, "second": second}
        verdict = await endpoint.verdict(filled(options.prompt, values))
        return _WON_BY_FIRST[winner_of(verdict, options.verdict_pattern)]

    async def judged(turn: Turn) -> Feedback:
        first, second = await asyncio.gather(
            won_by_first(turn, turn.response, turn.answer), won_by_first(turn, turn.answer, turn.response)
        )
        metrics = {"has_verdict": 1.0, "is_consistent": float(first == 1 - second)}
        return Feedback({"judge": (first + 1 - second) / 2}, metrics=metrics)

    return JudgeEnvironment(judged, options.default_reward)


class JudgeEndpoint:
    """Asks a model behind an OpenAI-compatible API."""

    def __init__(self, options: EndpointOptions) -> None:
        """Prepare the client; nothing is sent yet.

        Raises ValueError when the environment variable with the API key is not set.
        """
        self._options = options
        self._key = _NO_KEY
        if (variable := options.api_key_variable) is not None:
            self._key = os.environ.get(variable, "")
            if not self._key:
                raise ValueError(f"options.api_key_variable={variable} is no environment variable here")
        self._client = openai.AsyncOpenAI(
            base_url=options.base_url,
            api_key=self._key,
            timeout=options.request_timeout_s,
            max_retries=options.max_attempts - 1,
        )

    async def verdict(self, question: str) -> str:
        """Send a question as the single message of a user, and return the model's answer.

        Raises NoVerdict: ``unreachable`` when the server does not answer in time or answers with an error,
        after ``max_attempts``; ``malformed`` for an answer without text.
        """
        options = self._options
        try:
            async with asyncio.timeout(options.request_timeout_s * options.max_attempts):
                answer = await self._client.chat.completions.create(
                    model=options.model,
                    messages=[{"role": "user", "content": encodable(question)}],
                    max_tokens=openai.omit if options.max_tokens is None else options.max_tokens,
                    temperature=openai.omit if options.temperature is None else options.temperature,
                    extra_body=dict(options.extra_body) or None,
                )
        except (json.JSONDecodeError, RecursionError) as error:
            raise NoVerdict(FailureKind.malformed, self._reason(f"no JSON: {error}")) from error
        except (openai.OpenAIError, TimeoutError) as error:
            came_back = f"{type(error).__name__}: {error}".rstrip(": ")
            if isinstance(error.__cause__, Exception):
                came_back += f" ({type(error.__cause__).__name__}: {error.__cause__})"
            raise NoVerdict(FailureKind.unreachable, self._reason(came_back)) from error
        # A server of another kind may answer anything, which the client hands on as it is.
        choices = getattr(answer, "choices", None)
        if not choices:
            raise NoVerdict(FailureKind.malformed, self._reason(f"no chat completion: {answer}"))
        if not choices[0].message.content:
            ended = f"finish_reason={choices[0].finish_reason}"
            raise NoVerdict(FailureKind.malformed, self._reason(f"a verdict without text ({ended})"))
        return choices[0].message.content

    def _reason(self, came_back: str) -> str:
        """Return a message with the server's answer and address, but never the API key, which some servers
        repeat."""
        shown = came_back if self._key == _NO_KEY else came_back.replace(self._key, "***")
        where = f"the judge {self._options.model} at {self._options.base_url}"
        return f"{where} gave {shown[:_MAX_SHOWN_CHARACTERS]}"


def filled(question: str, values: Mapping[str, str]) -> str:
    """Return the question with each ``{name}`` of ``values`` replaced, all at once; all other braces, and
    braces in a value, stay."""
    names = "|".join(map(re.escape, values))
    return re.sub(rf"\{{({names})\}}", lambda match: values[match[1]], question)


def prompt_text(prompt: Prompt) -> str:
    """Return a prompt as a judge reads it: plain text or a single message unchanged; several messages one
    below the other, each after its role and with its tool calls."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return as_text(prompt[0])
    return "\n\n".join(f"{message.role}: {as_text(message)}" for message in prompt)


def reward_of(verdict: str, options: JudgeOptions) -> float:
    """Return the reward of a verdict, from 0 to 1.

    Raises NoVerdict when the pattern finds no number from ``min_score`` to ``max_score``.
    """
    found = extract_answer(verdict, options.score_pattern)
    if found is None:
        raise _unreadable(verdict, f"options.score_pattern={options.score_pattern} finds nothing in it")
    try:
        score = float(found)
    except ValueError:
        raise _unreadable(verdict, f"its score {found!r} is no number") from None
    low, high = options.min_score, options.max_score
    if not low <= score <= high:
        raise _unreadable(verdict, f"its score {score:g} is not from {low:g} to {high:g}")
    return (score - low) / (high - low)


def winner_of(verdict: str, pattern: str) -> str:
    """Return A, B, or C for a tie, also when the verdict has them in lower case.

    Raises NoVerdict when the pattern finds none of these.
    """
    found = extract_answer(verdict, pattern)
    if found is None:
        raise _unreadable(verdict, f"options.verdict_pattern={pattern} finds nothing in it")
    if found.upper() not in _WON_BY_FIRST:
        raise _unreadable(verdict, f"{found!r} is none of {', '.join(_WON_BY_FIRST)}")
    return found.upper()


def _unreadable(verdict: str, rule: str) -> NoVerdict:
    end = verdict[-_MAX_SHOWN_CHARACTERS:]  # verdicts come last
    return NoVerdict(FailureKind.malformed, f"the verdict cannot be read: {rule}; it ends with {end!r}")


def has_answer_if_asked(options: JudgeOptions) -> RecordCheck:
    return answer(options) if "{answer}" in options.prompt else needs_nothing
