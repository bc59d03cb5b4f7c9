"""Finds where a prompt's images go: image parts of messages, and the mark ``<image>`` that stands for
each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_like.data.images import IMAGE_MARK, ImageError, Picture, picture_of
from nemo_like.data.interface import Prompt


def with_parts_as_marks(
    prompt: Any, images: tuple[Picture, ...], directory: str | None, where: str
) -> tuple[Any, tuple[Picture, ...]]:
    """Return a record's prompt with ``<image>`` in place of image parts, and the pictures in their order.

    A part is ``{"type": "text", "text": ...}``, or ``{"type": "image"}``, either with an image of its own or
    for the next one of the record's ``images``. A prompt without parts is returned unchanged. Raises
    ImageError for any other part, and for an image part without an image.
    """
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not any(map(_has_parts, prompt)):
        return prompt, images
    left, found = list(images), list[Picture]()
    messages = []
    for message in prompt:
        texts = []
        for part in message["content"] if _has_parts(message) else ():
            text, picture = _part(part, left, directory, f"{where}, image {len(found) + 1}")
            texts.append(text)
            found += [picture] if picture is not None else []
        messages.append({**message, "content": "".join(texts)} if _has_parts(message) else message)
    if left:
        raise ImageError(
            f"{where}: {len(left)} of its {len(images)} images have no image part in the messages"
        )
    return messages, tuple(found)


def _has_parts(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else None
    return isinstance(content, Sequence) and not isinstance(content, str)


def _part(part: Any, left: list[Picture], directory: str | None, where: str) -> tuple[str, Picture | None]:
    """Return a part's text, and its picture or None; an image part without a picture takes the next one from
    ``left``."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return part["text"], None
    if kind not in ("image", "image_url"):
        raise ImageError(
            f"{where}: a part of a message is of type {kind!r}; there are text, image and image_url"
        )
    own = {key: value for key, value in part.items() if key not in ("type", "text") and value is not None}
    if own:
        return IMAGE_MARK, picture_of(own, directory, where)
    if not left:
        raise ImageError(
            f"{where}: an image part of the messages has no image, and none is left in the record"
        )
    return IMAGE_MARK, left.pop(0)


def with_marks(prompt: Prompt, num_images: int, where: str) -> Prompt:
    """Return the prompt with a mark for each of its images. If it has no marks, all are put before the text,
    or, in a conversation, before the text of the user's first message.

    Raises ImageError when it has some marks, but not as many as images.
    """
    num_marks = sum(text.count(IMAGE_MARK) for text in texts_of(prompt))
    if num_marks == num_images:
        return prompt
    if num_marks:
        raise ImageError(
            f"{where}: the text has {IMAGE_MARK} {num_marks} times, and there are {num_images} images"
        )
    marks = IMAGE_MARK * num_images
    if isinstance(prompt, str):
        return marks + prompt
    first = next((number for number, one in enumerate(prompt) if one.role == "user"), 0)
    message = replace(prompt[first], content=marks + prompt[first].content)
    return (*prompt[:first], message, *prompt[first + 1 :])


def texts_of(prompt: Prompt) -> list[str]:
    """Return the texts of a prompt: itself, or the contents of its messages."""
    return [prompt] if isinstance(prompt, str) else [message.content for message in prompt]


def in_texts(prompt: Prompt, old: str, new: str) -> Prompt:
    """Return the prompt with ``old`` replaced by ``new`` in all of its texts."""
    if isinstance(prompt, str):
        return prompt.replace(old, new)
    return tuple(replace(message, content=message.content.replace(old, new)) for message in prompt)
