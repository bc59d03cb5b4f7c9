"""Prompts that the package reasoning-gym generates; a name chooses one of its datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_like.data.answers import answer_text
from nemo_like.data.interface import Split, TaskPrompt

# A prompt is a function of seed + index. These seeds are so far apart that the splits share no prompt.
_DEFAULT_SEEDS: dict[Split, int] = {"train": 0, "validation": 1_000_000_000}


class ReasoningGymDataset:
    """A dataset of reasoning-gym.

    ``data["metadata"]`` of a prompt has what reasoning-gym needs to score a response.
    """

    def __init__(self, name: str, options: Mapping[str, Any], split: Split) -> None:
        """Create the dataset ``name`` with its own ``options``, such as ``size`` and ``seed``.

        Raises ValueError when there is no such dataset, or it does not accept the options.
        """
        import reasoning_gym

        arguments = {"seed": _DEFAULT_SEEDS[split], **options}
        try:
            self._prompts = reasoning_gym.create_dataset(name, **arguments)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"data.{split}.path={name} with options {arguments}: {error}") from error

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> TaskPrompt:
        """Return prompt ``index``. Raises IndexError outside 0 .. len - 1."""
        if not 0 <= index < len(self):
            raise IndexError(f"no problem {index} in a reasoning-gym dataset of {len(self)}")
        entry = self._prompts[index]
        answer = answer_text(entry["answer"], f"problem {index} of reasoning-gym")
        return TaskPrompt(entry["question"], answer, {"metadata": entry["metadata"]})
