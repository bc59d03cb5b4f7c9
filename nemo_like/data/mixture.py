"""Datasets made from other datasets: with prompts in a template, several in a row, or a selection from
one."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_like.data.interface import Message, Prompt, PromptDataset, TaskPrompt
from nemo_like.data.options import DatasetConfig


class TemplatedDataset:
    """The prompts of a source, each passed through ``templated`` when it is read."""

    def __init__(
        self, prompts: PromptDataset, cfg: DatasetConfig, tools: tuple[Mapping[str, Any], ...] = ()
    ) -> None:
        self._prompts, self._cfg, self._tools = prompts, cfg, tools

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> TaskPrompt:
        return templated(self._prompts[index], self._cfg, self._tools)


def templated(
    task_prompt: TaskPrompt, cfg: DatasetConfig, tools: tuple[Mapping[str, Any], ...] = ()
) -> TaskPrompt:
    """Return the prompt in the form that the configuration describes, with its difficulty, its
    environment's name and the chat template's arguments. Raises ValueError when ``difficulty_key`` names
    nothing in it.

    A text prompt replaces {prompt} in ``prompt_template``. With ``use_chat_template`` the text becomes the
    user's message of a conversation, after ``system_prompt`` if there is one. A prompt that is already a list
    of messages only gets the system message, unless it begins with one.
    """
    difficulty = "" if cfg.difficulty_key is None else difficulty_of(task_prompt.data, cfg.difficulty_key)
    return replace(
        task_prompt,
        prompt=_templated_prompt(task_prompt.prompt, cfg),
        env=cfg.env,
        difficulty=difficulty,
        tools=tools,
        template=cfg.chat_template_kwargs,
    )


def difficulty_of(data: Mapping[str, Any], key: str) -> str:
    """Return the value at ``key``, as text; a dot in the key leads into a mapping.

    Raises ValueError, naming the part of the key that is missing.
    """
    value: Any = data
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            there = (
                ", ".join(map(repr, sorted(map(str, value)))) if isinstance(value, Mapping) else "no mapping"
            )
            raise ValueError(f"data.*.difficulty_key={key}: a problem has no {part!r} there, but {there}")
        value = value[part]
    return str(value)


def _templated_prompt(prompt: Prompt, cfg: DatasetConfig) -> Prompt:
    if isinstance(prompt, str):
        text = prompt if cfg.prompt_template is None else cfg.prompt_template.replace("{prompt}", prompt)
        if not cfg.use_chat_template:
            return text
        prompt = (Message("user", text),)
    if cfg.system_prompt is None or prompt[0].role == "system":
        return prompt
    return (Message("system", cfg.system_prompt), *prompt)


class MixedDataset:
    """Several sources, one after the other; the index counts through all of them."""

    def __init__(self, sources: Sequence[PromptDataset]) -> None:
        self._sources = list(sources)
        self._starts = list(itertools.accumulate((len(source) for source in sources), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> TaskPrompt:
        """Return prompt ``index``. Raises IndexError outside 0 .. len - 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"no problem {index} in {len(self._sources)} sources of {len(self)} together")
        source = bisect.bisect_right(self._starts, index) - 1
        return self._sources[source][index - self._starts[source]]


class Selection:
    """The prompts of a dataset at ``indices``, in that order."""

    def __init__(self, prompts: PromptDataset, indices: Sequence[int]) -> None:
        self._prompts, self._indices = prompts, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> TaskPrompt:
        """Return prompt ``index`` of the selection. Raises IndexError outside 0 .. len - 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"no problem {index} in a selection of {len(self)}")
        return self._prompts[self._indices[index]]


def short_enough(
    prompts: PromptDataset,
    prompt_lengths: Callable[[Sequence[TaskPrompt]], Sequence[int]],
    max_tokens: int,
) -> list[int]:
    """Return the indices of the prompts that have at most ``max_tokens`` tokens.

    ``prompt_lengths`` counts the tokens of each prompt; it gets at most a thousand prompts at a time. Raises
    ValueError for a prompt of no tokens, from which nothing can be generated.
    """
    kept: list[int] = []
    for start in range(0, len(prompts), 1000):
        indices = range(start, min(start + 1000, len(prompts)))
        lengths = prompt_lengths([prompts[index] for index in indices])
        if not all(lengths):
            empty = prompts[start + list(lengths).index(0)].prompt
            raise ValueError(f"the tokenizer makes no token of the prompt {empty!r}")
        kept += [index for index, length in zip(indices, lengths, strict=True) if length <= max_tokens]
    return kept
