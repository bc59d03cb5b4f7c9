"""A sample's whole conversation as messages: who said what, and which images were seen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_like.data.images import IMAGE_MARK, Picture
from nemo_like.data.interface import Message
from nemo_like.rollout.conversation import Conversation


def messages_of(sample: Conversation, observation_role: str) -> list[dict[str, Any]]:
    """Return the conversation as a list of ``{"role": ..., "content": ...}``, in the form of records.

    A prompt of text is a message of the user; messages of a prompt keep all of their fields. Responses are
    messages of the assistant, with their tool calls; observations have the role ``observation_role``. With
    images, the content is a list of parts: ``{"type": "text", "text": ...}`` and ``{"type": "image", ...}``.
    An image of the prompt has its ``path``, or, when the record itself holds the image, the name of the
    record in ``record``; an image of an observation has the ``bytes`` of its file.
    """
    prompt, pictures = sample.task_prompt.prompt, list(map(_of_prompt, sample.task_prompt.images))
    messages: list[dict[str, Any]] = []
    for message in (Message("user", prompt),) if isinstance(prompt, str) else prompt:
        num_images = message.content.count(IMAGE_MARK) if pictures else 0
        content = _content(message.content, pictures[:num_images])
        messages.append({**message.as_mapping(), "content": content})
        pictures = pictures[num_images:]
    for exchange, files in zip(sample.history, sample.observed_images, strict=True):
        images = [{"type": "image", "bytes": file} for file in files]
        _add_response(messages, exchange.response)
        messages.append({"role": observation_role, "content": _content(exchange.observation, images)})
    if sample.num_turns:
        _add_response(messages, sample.latest_response)
    return messages


def _add_response(messages: list[dict[str, Any]], response: str) -> None:
    """Append a response: to the prompt's last message if that is the assistant's, else as a new message."""
    if messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": response})
        return
    begun = messages[-1]["content"]
    is_text = isinstance(begun, str)
    messages[-1]["content"] = begun + response if is_text else [*begun, {"type": "text", "text": response}]


def _of_prompt(picture: Picture) -> dict[str, str]:
    if isinstance(picture.source, str):
        return {"type": "image", "path": picture.source}
    return {"type": "image", "record": picture.where}


def _content(text: str, images: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a text as it is, or, with images, as parts; ``text`` has one mark for each image."""
    if not images:
        return text
    first, *texts = text.split(IMAGE_MARK)
    parts = [{"type": "text", "text": first}] if first else []
    for image, after in zip(images, texts, strict=True):
        parts += [image, *([{"type": "text", "text": after}] if after else [])]
    return parts
