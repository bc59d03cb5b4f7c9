"""Rewards by a reward model: a sequence-classification checkpoint of transformers with one label.

    prompt and response ──▶ the model's own chat template and tokenizer ──▶ forward pass per call ──▶ score

Scores do not depend on the other conversations of a pass, except for float rounding.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from nemo_like.data.chat_rendering import ChatRendering
from nemo_like.data.interface import Message, Prompt, TaskPrompt
from nemo_like.data.messages import with_response
from nemo_like.data.special_tokens import SpecialTokens
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.kind import RecordCheck
from nemo_like.environments.per_turn import raised
from nemo_like.environments.record_needs import NUM_PARSED, needs_nothing
from nemo_like.environments.shared_options import ModelOptions
from nemo_like.models.remote_code import import_external_libs

_ARCHITECTURE = "ForSequenceClassification"


class ConversationEncoder:
    """Turns conversations into the tokens of a reward model, and knows how many tokens the model reads."""

    def __init__(self, options: ModelOptions) -> None:
        """Load the tokenizer and read config.json; the weights are not read.

        Raises ValueError when ``model_name`` is no directory with a sequence-classification model of one
        label and a tokenizer with a pad token, or when the model has fewer positions than ``max_length``.
        """
        path = Path(options.model_name)
        self._key = f"model_name={options.model_name}"
        if not path.is_dir():
            raise ValueError(f"{self._key} is not a directory; download the model, and name its directory")
        import_external_libs()
        self.config = _config(self._key, path)
        self.tokenizer = self._tokenizer(path)
        self._chat = ChatRendering(self.tokenizer, f"chat_template.jinja in {path}")
        self._around = SpecialTokens.of(self.tokenizer)
        num_positions = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        wanted = options.max_length
        if wanted is not None and num_positions is not None and wanted > num_positions:
            raise ValueError(
                f"max_length={wanted} must be at most the {num_positions} positions of the model"
            )
        self.max_length: int | None = num_positions if wanted is None else wanted

    def encode(self, prompt: Prompt, response: str) -> list[int]:
        """Return the token ids of a conversation that ends with ``response``, as ``rendered`` does.

        Raises ValueError also when there are none, or more than ``max_length``.
        """
        ids = self.rendered(prompt, response)
        if not ids:
            raise ValueError("the conversation has no tokens")
        if self.max_length is not None and len(ids) > self.max_length:
            raise ValueError(
                f"the conversation has {len(ids)} tokens, and the reward model reads {self.max_length}; "
                "shorten responses (generation.max_new_tokens), or raise options.max_length where it is set"
            )
        return ids

    def rendered(self, prompt: Prompt, response: str) -> list[int]:
        """Return the token ids of a conversation of any length.

        The chat template renders it; a prompt of plain text counts as a user's message. Without a template
        the response follows the prompt, which must be plain text, and the special tokens that the tokenizer
        puts around a text are there once. Raises ValueError for messages without a template, and for messages
        that the template refuses or leaves out.
        """
        if self.tokenizer.chat_template is not None:
            messages = (Message("user", prompt),) if isinstance(prompt, str) else prompt
            try:
                text = self._chat.checked_conversation(with_response(messages, response))
            except ValueError as error:
                raise ValueError(f"the reward model {self._key}: {error}") from error
            return self._own_tokens(text)
        if isinstance(prompt, str):
            return self._around.whole_text(self._own_tokens(prompt + response))
        raise ValueError(
            f"the prompt is a list of messages, but the tokenizer of {self._key} has no chat template; "
            "use prompts of plain text, or write the template to chat_template.jinja there"
        )

    def _own_tokens(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def _tokenizer(self, path: Path) -> Any:
        if not (path / "tokenizer_config.json").is_file():
            raise ValueError(f"{self._key} has no tokenizer; save it there with save_pretrained")
        # Pads go to the right: a score is read at the last token that is no pad, and positions count from
        # the left.
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, padding_side="right")
        if tokenizer.pad_token_id is None:
            raise ValueError(
                f"{self._key} has a tokenizer without a pad token, so that conversations of different "
                "lengths cannot be scored together; set pad_token in its tokenizer_config.json to a special "
                "token that no conversation has"
            )
        return tokenizer


def _config(key: str, path: Path) -> Any:
    """Return the content of config.json. Raises ValueError when the checkpoint is no reward model."""
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"{key} has no config.json that transformers can read: {error}") from error
    names = config.architectures or ["nothing"]
    if not names[0].endswith(_ARCHITECTURE):
        raise ValueError(
            f"{key} is a checkpoint of {names[0]}, and a reward model is one of a class that ends in "
            f"{_ARCHITECTURE}"
        )
    if config.num_labels != 1:
        raise ValueError(
            f"{key} has {config.num_labels} labels, and a reward model has one, whose output is the reward"
        )
    return config


class RewardModelEnvironment:
    """Scores the conversations of a call in one forward pass; the reward is the component ``score``."""

    def __init__(self, options: ModelOptions) -> None:
        """Load the model, without dropout, onto the device.

        Raises ValueError as ``ConversationEncoder`` does, and for a checkpoint that lacks some of the
        weights.
        """
        self._encoder = ConversationEncoder(options)
        self._device = torch.device(options.device.value)
        model, found = AutoModelForSequenceClassification.from_pretrained(
            options.model_name,
            config=self._encoder.config,
            dtype=getattr(torch, options.precision.value),
            local_files_only=True,
            output_loading_info=True,
        )
        if missing := sorted(found["missing_keys"]):
            raise ValueError(
                f"model_name={options.model_name} lacks the weights {', '.join(missing)}, without which its "
                "scores would be random"
            )
        # The model looks for the last token that is no pad, by the id that its configuration has.
        pad = self._encoder.tokenizer.pad_token_id
        model.config.pad_token_id = model.config.get_text_config().pad_token_id = pad
        self._model = model.to(self._device).eval()

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order; a failed one for a conversation that cannot be scored."""
        rows: dict[int, list[int]] = {}
        feedback: dict[int, Feedback] = {}
        for index, turn in enumerate(turns):
            try:
                rows[index] = self._encoder.encode(turn.prompt, turn.response)
            except Exception as error:
                feedback[index] = _failed(error)
        feedback |= zip(rows, self._judged(list(rows.values())), strict=True)
        return [feedback[index] for index in range(len(turns))]

    def _judged(self, rows: Sequence[list[int]]) -> list[Feedback]:
        """Return the feedback to each row of token ids. When the forward pass of all rows raises, for example
        for want of memory, each row gets its own pass."""
        if not rows:
            return []
        try:
            return [Feedback({"score": score}) for score in self._scores(rows)]
        except Exception as error:
            traceback.print_exc()
            if len(rows) == 1:
                return [raised(error)]
        return [feedback for row in rows for feedback in self._judged([row])]

    @torch.inference_mode()
    def _scores(self, rows: Sequence[list[int]]) -> list[float]:
        padded = self._encoder.tokenizer.pad({"input_ids": list(rows)}, return_tensors="pt")
        logits = self._model(**padded.to(self._device)).logits  # [rows, 1]
        return logits[:, 0].float().tolist()


def _failed(error: Exception) -> Feedback:
    return Feedback.failed(FailureKind.raised, str(error)) if isinstance(error, ValueError) else raised(error)


def is_rendered(options: ModelOptions) -> RecordCheck:
    """Return a check that renders the reference answers as responses, since chat templates refuse or leave
    out some roles.

    It checks nothing when the reward model cannot be used: another check reports that.
    """
    try:
        encoder = ConversationEncoder(options)
    except ValueError:
        return needs_nothing
    num_rendered = 0

    def check(task_prompt: TaskPrompt) -> None:
        nonlocal num_rendered
        if num_rendered < NUM_PARSED:
            num_rendered += 1
            encoder.rendered(task_prompt.prompt, task_prompt.answer)

    return check
