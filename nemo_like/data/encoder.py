"""Turns prompts and observations into tokens, and their images into columns of the data plane."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from nemo_like.data.images import ImageError, Picture
from nemo_like.data.interface import Encoded, Observation, TaskPrompt
from nemo_like.data.tokenizer import Tokenizer, UnreadablePrompt
from nemo_like.data.vision import Vision


class PromptEncoder:
    """Encodes prompts with a checkpoint's tokenizer and, for a model with a vision tower, its image
    processor."""

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

    def lengths(self, task_prompts: Sequence[TaskPrompt]) -> list[int]:
        """Return the number of tokens of each prompt; of images only the sizes are read.

        Raises ImageError for an image without a size, or with more tokens than a prompt may have.
        """
        of_images = [
            sum(self._num_tokens(picture) - 1 for picture in task_prompt.images)
            for task_prompt in task_prompts
        ]
        return [len(ids) + more for ids, more in zip(self._text_ids(task_prompts), of_images, strict=True)]

    def check_images(self, task_prompt: TaskPrompt) -> None:
        """Decode the images of a prompt. Raises ImageError as ``lengths`` does, and for a broken image."""
        for picture in task_prompt.images:
            self._num_tokens(picture)
            picture.decoded()

    def decode_response(self, token_ids: Iterable[int], stop_token_ids: Collection[int]) -> str:
        """Return the text of one response, as ``Tokenizer.decode_response`` does."""
        return self.tokenizer.decode_response(token_ids, stop_token_ids)

    def encode(self, task_prompts: Sequence[TaskPrompt]) -> list[Encoded]:
        """Return the tokens and images of each prompt; ``failure`` is set when an image cannot be read."""
        return [
            self._encoded(ids, task_prompt.images)
            for task_prompt, ids in zip(task_prompts, self._text_ids(task_prompts), strict=True)
        ]

    def encode_observation(
        self, asked: TaskPrompt, observation: Observation, role: str, last_token_id: int
    ) -> Encoded:
        """Return the tokens between a response and the next, as ``Tokenizer.encode_observation`` does, and
        the images of the observation; ``failure`` is set when an image cannot be read."""
        text, images = observation.text, observation.images
        try:
            if images:
                text = self._vision_for(images[0]).own_text(text)
            ids = self.tokenizer.encode_observation(asked.prompt, text, role, last_token_id, asked.template)
            self._check_marks(ids, len(images), f"the observation {observation.text[:80]!r}")
        except ImageError as error:
            return Encoded((), failure=str(error))
        return self._encoded(ids, images)

    def _encoded(self, text_ids: Sequence[int], images: Sequence[Picture]) -> Encoded:
        """Return a text's tokens, with each image's single token repeated for its features, and the images.
        When an image cannot be read, or the images are too large for a prompt, return the text's tokens alone
        and the failure."""
        if not images:
            return Encoded(tuple(text_ids))
        vision = self._vision_for(images[0])
        try:
            # A file is read once, so that engine and trainer see the same image.
            pictures = [replace(picture, source=picture.read()) for picture in images]
            for picture in pictures:
                self._num_tokens(picture)
            columns = vision.columns([picture.decoded() for picture in pictures])
            token_ids = vision.expanded(text_ids, columns)
            if len(token_ids) > self._max_prompt_tokens:
                raise ImageError(
                    f"{images[0].where}: with all images the text has {len(token_ids)} tokens, and a prompt "
                    f"has at most {self._max_prompt_tokens}"
                )
        except ImageError as error:
            without = tuple(token for token in text_ids if token != vision.image_token)
            return Encoded(without, failure=str(error))
        return Encoded(tuple(token_ids), tuple(map(Picture.read, pictures)), columns)

    def _text_ids(self, task_prompts: Sequence[TaskPrompt]) -> list[list[int]]:
        """Return the tokens of the prompts' texts, in which each image has one token.

        Raises ImageError as ``_check_marks`` does, and ValueError, which names the record, for a prompt that
        cannot be given to the policy as it is.
        """
        prompts = [
            self._vision_for(task_prompt.images[0]).own_prompt(task_prompt.prompt)
            if task_prompt.images
            else task_prompt.prompt
            for task_prompt in task_prompts
        ]
        try:
            tools, templates = [each.tools for each in task_prompts], [each.template for each in task_prompts]
            ids = self.tokenizer.encode_prompts(prompts, tools, templates)
        except UnreadablePrompt as error:
            task_prompt = task_prompts[error.index]
            where = task_prompt.where or f"the problem with the prompt {str(task_prompt.prompt)[:80]!r}"
            raise ValueError(f"{where}: {error}") from error
        for task_prompt, tokens in zip(task_prompts, ids, strict=True):
            self._check_marks(tokens, len(task_prompt.images), f"the prompt {str(task_prompt.prompt)[:80]!r}")
        return ids

    def _check_marks(self, token_ids: Sequence[int], num_images: int, what: str) -> None:
        """Raise ImageError unless a text has exactly one image token for each image."""
        if self._vision is not None and token_ids.count(self._vision.image_token) != num_images:
            raise ImageError(
                f"{what} has the token of an image {token_ids.count(self._vision.image_token)} times, and "
                f"{num_images} images; write <image> where an image goes, and the model's own token nowhere"
            )

    def _vision_for(self, picture: Picture) -> Vision:
        """Return the image processor. Raises ImageError when the model has no vision tower."""
        if self._vision is None:
            raise ImageError(f"{picture.where}: the model has no vision tower, so it reads no images")
        return self._vision

    def _num_tokens(self, picture: Picture) -> int:
        height, width = picture.size()
        vision = self._vision_for(picture)
        try:
            num_tokens = vision.num_tokens((height, width))
        except ValueError as error:  # the image processor refuses some shapes
            raise ImageError(
                f"{picture.where}: {width} x {height} pixels cannot be used ({error})"
            ) from error
        if num_tokens > self._max_prompt_tokens:
            raise ImageError(
                f"{picture.where}: {width} x {height} pixels take {num_tokens} tokens, and a prompt has at "
                f"most {self._max_prompt_tokens}; make the image smaller, or raise "
                "policy.max_total_sequence_length (and data.max_input_seq_length, where set)"
            )
        return num_tokens
