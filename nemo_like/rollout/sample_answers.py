"""A sample of a validation as a person reads it."""

from __future__ import annotations

from nemo_like.data.interface import Prompt
from nemo_like.observability.summary import SampleAnswer
from nemo_like.rollout.conversation import Conversation


def sample_answer(sample: Conversation, solved_reward: float) -> SampleAnswer:
    """The sample in words, written as its task says that people write it.

    Where that would hide why an answer is wrong, since a wrong one is then written like the right one, the
    texts stay as they are.
    """
    prompt, response = _as_text(sample.example.prompt), sample.transcript()
    answer, as_written = sample.example.answer, sample.example.as_written
    if as_written is not None:
        written = as_written(prompt), as_written(response), as_written(answer)
        if (written[1] == written[2]) == (response == answer):
            prompt, response, answer = written
    return SampleAnswer(
        prompt,
        response,
        answer,
        sample.reward,
        is_solved=sample.reward is not None and sample.reward >= solved_reward,
        failure=sample.failure.reason if sample.failure else None,
    )


def _as_text(prompt: Prompt) -> str:
    """Of a conversation, the last message and the break before the response."""
    return prompt if isinstance(prompt, str) else f"{prompt[-1].content}\n"
