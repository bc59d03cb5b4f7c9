"""The interface between datasets and rollouts: prompts, reference answers, and data for the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from nemo_like.data.images import Picture
from nemo_like.data.options import DatasetConfig

Split = Literal["train", "validation"]


@dataclass(frozen=True, slots=True)
class Message:
    """One entry of a conversation; the tokenizer's chat template renders it."""

    role: str
    content: str  # "" beside tool calls without a text
    # All other fields as the record has them: tool_calls, name, tool_call_id, reasoning_content and the like.
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def as_mapping(self) -> dict[str, Any]:
        """Return the message in the form of records, with all of its fields."""
        return {"role": self.role, "content": self.content, **self.extra}


Prompt = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TaskPrompt:
    """One prompt of a task, with the reference answer and all data that its record holds.

    ``answer`` is the reference answer, ``data`` has the record's further fields for the environment, and
    ``env`` is the environment's name. ``as_written`` turns a prompt, response or answer into the way people
    write; None: it is so already.
    """

    prompt: Prompt
    answer: str
    data: Mapping[str, Any] = field(default_factory=dict)
    env: str = ""
    columns: Mapping[str, Any] = field(default_factory=dict)  # what data.*.columns sends to the trainer
    as_written: Callable[[str], str] | None = None
    images: tuple[Picture, ...] = ()  # one for each <image> in the prompt, in this order
    difficulty: str = ""  # the value of data.*.difficulty_key
    tools: tuple[Mapping[str, Any], ...] = ()  # the chat template describes them to the policy
    template: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the chat template
    where: str = field(
        default="", compare=False
    )  # its origin, for error messages: file and line, or file and record


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceReport:
    """How many prompts of a source can be sampled, and how many were left out."""

    name: str
    num_prompts: int  # prompts that can be sampled
    num_too_long: int  # prompts left out because they are longer than ``rollout.tasks.max_prompt_tokens``
    digest: str  # of its prompts' contents, as ``data.content_digest`` makes it


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's reply to a response."""

    text: str  # with <image> where an image goes
    images: tuple[Picture, ...] = ()  # one for each <image>, in this order


@dataclass(frozen=True, slots=True)
class Encoded:
    """The tokens of a prompt or of an observation, and its images."""

    token_ids: tuple[int, ...]  # an image has one token for each of its features
    images: tuple[bytes, ...] = ()  # the images' files, for the engines
    columns: Mapping[str, Any] = field(default_factory=dict)  # of the images, for the trainer
    failure: str | None = None  # why an image cannot be read; then no token stands for one


class EnvironmentData(Protocol):
    """Prompts that environments make, and tools that they bring."""

    def prompts(self, cfg: DatasetConfig, split: Split) -> PromptDataset:
        """Return the prompts that the source's environment makes. Raises ValueError when it makes none."""

    def settings(self, cfg: DatasetConfig) -> Mapping[str, Any]:
        """Return the settings that decide which prompts the source's environment makes."""

    def tools(self, env: str) -> tuple[Mapping[str, Any], ...]:
        """Return the tools that responses to an environment's prompts may call, in the form of chat
        templates. Raises ValueError when it cannot list them."""


class PromptDataset(Protocol):
    """A finite, ordered set of prompts; an index always gives the same prompt."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> TaskPrompt:
        """Return prompt ``index``. Raises IndexError outside 0 .. len - 1."""
