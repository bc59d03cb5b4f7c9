"""The keys of the sources of problems, ``data``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Annotated, Any

from nemo_like.config.keys import Key


class DatasetKind(Enum):
    arithmetic = "arithmetic"
    jsonl = "jsonl"
    huggingface = "huggingface"
    reasoning_gym = "reasoning_gym"
    environment = "environment"  # the environment that judges them makes them


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """One source of problems."""

    name: Annotated[
        str | None, Key("its name in metrics and messages; null: the last part of its path, or its kind")
    ]
    kind: Annotated[DatasetKind, Key()]
    path: Annotated[
        str | None,
        Key("jsonl: a file; huggingface: a name, file or directory; reasoning_gym: a dataset's name"),
    ]
    split: Annotated[
        str | None,
        Key(
            "huggingface, jsonl: a part of it, or of some of its rows, such as train[:100]; a "
            "file is one part"
        ),
    ]
    subset: Annotated[
        str | None, Key("huggingface: the configuration of a dataset that has several, such as main")
    ]
    prompt_key: Annotated[str, Key("jsonl, huggingface: the field with the prompt text")]
    answer_key: Annotated[str, Key("jsonl, huggingface: the field with the reference answer")]
    images_key: Annotated[
        str | None, Key("jsonl, huggingface: the field with a list of images, see docs/images.md")
    ]
    digits: Annotated[int, Key("arithmetic: digits per operand")]
    options: Annotated[
        dict[str, Any], Key("reasoning_gym: arguments of the dataset; environment: size and seed")
    ]
    weight: Annotated[
        float, Key("in training, its share of the prompts is its weight over the sum of all weights")
    ]
    prompt_template: Annotated[str | None, Key("a text in which {prompt} is replaced by a text prompt")]
    use_chat_template: Annotated[bool, Key("a text prompt becomes the user's message of a conversation")]
    system_prompt: Annotated[str | None, Key("the first message of that conversation")]
    env: Annotated[str, Key("the environment that judges its responses, a key of env")]
    difficulty_key: Annotated[
        str | None, Key("a field of a problem's data, by whose values an evaluation also reports")
    ]
    columns: Annotated[
        dict[str, str], Key("jsonl, huggingface: fields that travel to the trainer, see docs/columns.md")
    ]


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """The sources of problems. ``train`` and ``validation`` are each written as a list or a single source.

    A source takes the keys that it leaves out from ``default``.
    """

    train: Annotated[list[DatasetConfig], Key("one source, or a list of sources that are mixed by weight")]
    validation: Annotated[
        list[DatasetConfig], Key("one source, or a list of sources, each reported as a set of its own")
    ]
    default: Annotated[
        DatasetConfig, Key("a source of train or validation takes the keys that it leaves out from here")
    ]
    shuffle: Annotated[bool, Key("every epoch has a new order, which derives from grpo.seed", True)]
    max_input_seq_length: Annotated[
        int | None,
        Key("tokens; longer prompts are left out. null: what max_total_sequence_length leaves", None),
    ]
    chat_template: Annotated[
        str | None, Key("a Jinja file in place of the tokenizer's own chat template", None)
    ]


def source_name(source: DatasetConfig) -> str:
    """Return the name of a source in metrics and messages."""
    if source.name is not None:
        return source.name
    return source.kind.name if source.path is None else PurePath(source.path).stem
