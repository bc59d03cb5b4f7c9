"""The keys of the data sources, ``data``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.config.kinds import Kinds

SOURCE_KINDS = Kinds(
    "nemo_like.data.source_kinds",
    "kind of source",
    "nemo_like.data.source_kind:SourceKind",
    has_keys=False,
    otherwise_called={
        **dict.fromkeys(("csv", "tsv", "json", "parquet", "arrow"), "huggingface, which reads such files"),
        "hf": "huggingface",
        "hub": "huggingface",
    },
)


@dataclass(kw_only=True, slots=True)
class DatasetConfig:
    """One source of problems."""

    name: Annotated[
        str | None,
        Key("its name in metrics and messages; null: the last part of its path, or its kind", None),
    ]
    kind: Annotated[
        str,
        Key(
            "arithmetic, jsonl (one object per line), huggingface, reasoning_gym or environment",
            "arithmetic",
            kinds=SOURCE_KINDS,
        ),
    ]
    path: Annotated[
        str | None,
        Key(
            "jsonl: a file; huggingface: a name on the hub, a local file or directory; "
            "reasoning_gym: a dataset's name.",
            None,
            is_path=True,
        ),
    ]
    split: Annotated[
        str | None,
        Key('huggingface: for example "train", or "train[:100]"; null: the whole of a file', None),
    ]
    subset: Annotated[
        str | None,
        Key('huggingface: the configuration of a dataset that has several, as gsm8k\'s "main"', None),
    ]
    prompt_key: Annotated[
        str, Key("jsonl, huggingface: the field with the prompt, text or a list of messages", "prompt")
    ]
    answer_key: Annotated[
        str,
        Key("jsonl, huggingface: the field with the reference answer; a dot leads into a mapping", "answer"),
    ]
    images_key: Annotated[
        str | None,
        Key(
            "jsonl, huggingface: the field with a list of images; null: no images; docs/how_to/images.md",
            None,
        ),
    ]
    digits: Annotated[int, Key("arithmetic: digits per operand", 2)]
    options: Annotated[
        dict[str, Any],
        Key(
            "reasoning_gym: arguments of the dataset, for example {size: 1000}; environment: "
            "{size: 1000, seed: 0}",
            {},
        ),
    ]
    weight: Annotated[
        float, Key("in training, its share of the prompts is its weight over the sum of all weights", 1.0)
    ]
    prompt_template: Annotated[str | None, Key("a text in which {prompt} is replaced by a text prompt", None)]
    use_chat_template: Annotated[
        bool, Key("a text prompt becomes the user's message of a conversation", False)
    ]
    chat_template_kwargs: Annotated[
        dict[str, Any],
        Key(
            "arguments of the chat template for its conversations, for example {enable_thinking: false}; "
            "an agent's requests may overwrite them",
            {},
        ),
    ]
    system_prompt: Annotated[str | None, Key("the first message of that conversation", None)]
    env: Annotated[str, Key("the environment that judges its responses: a key of env", "arithmetic")]
    difficulty_key: Annotated[
        str | None,
        Key(
            "A field of a problem by whose values an evaluation also reports, as "
            "metadata.level; null: none. docs/how_to/evaluate.md",
            None,
        ),
    ]
    columns: Annotated[
        dict[str, str],
        Key(
            "jsonl, huggingface: fields for the trainer, for example {difficulty: float32}; "
            "docs/reference/columns.md",
            {},
        ),
    ]


@dataclass(kw_only=True, slots=True)
class DataConfig:
    """Where problems come from. Each has a prompt, and a reference answer by which the environment judges.
    ``train`` and ``validation`` are each written as a list or a single source.
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
        str | None, Key("a Jinja file in place of the tokenizer's own chat template", None, is_path=True)
    ]


def source_name(source: DatasetConfig) -> str:
    """Return the name of a source in metrics and messages."""
    if source.name is not None:
        return source.name
    return source.kind if source.path is None else PurePath(source.path).stem
