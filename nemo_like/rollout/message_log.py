"""A sample's whole conversation as messages: who said what, and which images were seen. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_like.data.images import IMAGE_MARK, Picture
from nemo_like.rollout.conversation import Conversation


def messages_of(sample: Conversation, observation_role: str) -> list[dict[str, Any]]:
    """Return the conversation as a list of ``{"role": ..., "content": ...}``, in the form of records.

    A prompt of text is a message of the user; responses are the assistant's, with the calls of tools that
    they make; observations are of ``observation_role``. With images, the content is a list of parts:
    ``{"type": "text", "text": ...}`` and ``{"type": "image", ...}``. An image of the prompt has its ``path``,
    or, where the record holds the image itself, says in ``record`` which record that is; one of an
    observation has the ``bytes`` of its file.
    """
    prompt, pictures = sample.example.prompt, list(map(_of_prompt, sample.example.images))
    said = [("user", prompt)] if isinstance(prompt, str) else [(one.role, one.content) for one in prompt]
    messages = []
    for role, text in said:
        num_images = text.count(IMAGE_MARK) if pictures else 0
        messages.append({"role": role, "content": _content(text, pictures[:num_images])})
        pictures = pictures[num_images:]
    for exchange, files in zip(sample.history, sample.observed_images, strict=True):
        images = [{"type": "image", "bytes": file} for file in files]
        messages.append({"role": "assistant", "content": exchange.response})
        messages.append({"role": observation_role, "content": _content(exchange.observation, images)})
    if sample.num_turns:
        messages.append({"role": "assistant", "content": sample.latest_response})
    return messages


def _of_prompt(picture: Picture) -> dict[str, str]:
    if isinstance(picture.source, str):
        return {"type": "image", "path": picture.source}
    return {"type": "image", "record": picture.where}


def _content(text: str, images: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return a text as it is, or, with images, as parts; ``text`` has a mark for each of them."""
    if not images:
        return text
    first, *texts = text.split(IMAGE_MARK)
    parts = [{"type": "text", "text": first}] if first else []
    for image, after in zip(images, texts, strict=True):
        parts += [image, *([{"type": "text", "text": after}] if after else [])]
    return parts
