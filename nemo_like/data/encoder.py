"""Turns problems into the tokens of their prompts, and their images into columns of the data plane."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from nemo_like.data.images import ImageError, Picture
from nemo_like.data.interface import PromptExample
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.data.vision import Vision


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """What a problem's samples begin with."""

    token_ids: tuple[int, ...]  # an image has one token for each of its features
    images: tuple[bytes, ...] = ()  # the images' files, for the engines
    columns: Mapping[str, Any] = field(default_factory=dict)  # of the images, for the trainer
    failure: str | None = None  # why an image cannot be read; then ``token_ids`` are those of the text


class PromptEncoder:
    """A checkpoint's tokenizer and, for a model with a vision tower, its image processor."""

    def __init__(
        self,
        checkpoint: str | os.PathLike[str],
        chat_template: str | os.PathLike[str] | None,
        max_prompt_tokens: int,
    ) -> None:
        """Load both, as ``Tokenizer`` says. No image may take more than ``max_prompt_tokens``."""
        self.tokenizer = Tokenizer(checkpoint, chat_template)
        self._vision = Vision.of(Path(checkpoint), self.tokenizer.token)
        self._max_prompt_tokens = max_prompt_tokens

    def lengths(self, examples: Sequence[PromptExample]) -> list[int]:
        """Return the number of tokens of each problem's prompt, by the sizes of its images alone.

        Raises ImageError for an image that has no size, or takes more tokens than a prompt may have.
        """
        of_images = [sum(self._num_tokens(picture) - 1 for picture in example.images) for example in examples]
        return [len(ids) + more for ids, more in zip(self._text_ids(examples), of_images, strict=True)]

    def check_images(self, example: PromptExample) -> None:
        """Decode the images of a problem. Raises ImageError as ``lengths`` does, and for a broken one."""
        for picture in example.images:
            self._num_tokens(picture)
            picture.decoded()

    def encode(self, examples: Sequence[PromptExample]) -> list[EncodedPrompt]:
        """Return the tokens and images of each problem's prompt; one whose image cannot be read says so."""
        return [
            self._encoded(example, ids)
            for example, ids in zip(examples, self._text_ids(examples), strict=True)
        ]

    def _encoded(self, example: PromptExample, text_ids: list[int]) -> EncodedPrompt:
        if not example.images:
            return EncodedPrompt(tuple(text_ids))
        vision = self._vision_for(example.images[0])
        try:
            # A file is read once, so that engine and trainer see the same image.
            pictures = [replace(picture, source=picture.read()) for picture in example.images]
            columns = vision.columns([picture.decoded() for picture in pictures])
        except ImageError as error:
            without = tuple(token for token in text_ids if token != vision.image_token)
            return EncodedPrompt(without, failure=str(error))
        return EncodedPrompt(
            tuple(vision.expanded(text_ids, columns)), tuple(map(Picture.read, pictures)), columns
        )

    def _text_ids(self, examples: Sequence[PromptExample]) -> list[list[int]]:
        """Return the tokens of the prompts' texts, in which each image has one token.

        Raises ImageError where a text has the token of an image that is not there.
        """
        prompts = [
            self._vision_for(example.images[0]).own_prompt(example.prompt)
            if example.images
            else example.prompt
            for example in examples
        ]
        ids = self.tokenizer.encode_prompts(prompts)
        if self._vision is not None:
            for example, tokens in zip(examples, ids, strict=True):
                if tokens.count(self._vision.image_token) != len(example.images):
                    raise ImageError(
                        f"the prompt {str(example.prompt)[:80]!r} has the token of an image "
                        f"{tokens.count(self._vision.image_token)} times, and {len(example.images)} images; "
                        "write <image> where an image goes, and the model's own token nowhere"
                    )
        return ids

    def _vision_for(self, picture: Picture) -> Vision:
        """Return the image processor. Raises ImageError when the model has no vision tower."""
        if self._vision is None:
            raise ImageError(f"{picture.where}: the model has no vision tower, so it reads no images")
        return self._vision

    def _num_tokens(self, picture: Picture) -> int:
        height, width = picture.size()
        num_tokens = self._vision_for(picture).num_tokens((height, width))
        if num_tokens > self._max_prompt_tokens:
            raise ImageError(
                f"{picture.where}: {width} x {height} pixels take {num_tokens} tokens, and a prompt has at "
                f"most {self._max_prompt_tokens}; make the image smaller, or raise "
                "policy.max_total_sequence_length (and data.max_input_seq_length, where set)"
            )
        return num_tokens
