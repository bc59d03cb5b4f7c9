"""Turns a validation sample into text for people."""

from __future__ import annotations

from nemo_like.data.interface import Prompt
from nemo_like.data.messages import as_text, is_begun
from nemo_like.observability.summary import SampleAnswer
from nemo_like.rollout.conversation import Conversation


def sample_answer(sample: Conversation, solved_reward: float) -> SampleAnswer:
    """Return a sample as text, rewritten by its prompt's ``as_written`` into the way people write.

    The texts are not rewritten where this would make a wrong answer look right, or a right one wrong.
    """
    prompt, response = _as_text(sample.task_prompt.prompt), sample.transcript()
    answer, as_written = sample.task_prompt.answer, sample.task_prompt.as_written
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
    """Return a text prompt, or the last message of a prompt of messages, with a line break unless the
    response continues that message."""
    if isinstance(prompt, str):
        return prompt
    return as_text(prompt[-1]) if is_begun(prompt) else f"{as_text(prompt[-1])}\n"
