"""Messages name rows as the program gave them, and never the files in which they were written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_like import GRPO
from nemo_like.api.row_names import RowNames
from nemo_like.config.problems import ConfigError, Problem
from scripts.demo_model.tiny_tokenizer import save_tokenizer

NAMES = RowNames({"/tmp/a/train-1.jsonl": "train", "/tmp/a/validation-2.jsonl": "validation"})
GOOD = {"prompt": "1+1=", "answer": "2"}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("/tmp/a/train-1.jsonl:1: 'prompt' is empty", "train[0]: 'prompt' is empty"),
        ("/tmp/a/train-1.jsonl:12, /tmp/a/validation-2.jsonl:1", "train[11], validation[0]"),
        ("data.train.path=/tmp/a/train-1.jsonl cannot", "train cannot"),
        ("is not a field of /tmp/a/train-1.jsonl, whose", "is not a field of train, whose"),
        ("/tmp/b/train-1.jsonl:1", "/tmp/b/train-1.jsonl:1"),
    ],
)
def test_lines_become_indexes_and_files_arguments(text: str, named: str) -> None:
    assert NAMES.in_text(text) == named


def test_problems_are_named_once() -> None:
    keys = ("data.train.path=/tmp/a/train-1.jsonl", "data.validation.path=/tmp/a/train-1.jsonl")
    with pytest.raises(ConfigError) as raised, NAMES.in_problems():
        raise ConfigError([Problem(key=key, rule="has /tmp/a/train-1.jsonl:3", remedy="") for key in keys])
    assert raised.value.problems == (Problem(key="train", rule="has train[2]", remedy=""),)
    assert raised.value.__suppress_context__


def said(checkpoint: Path, capsys: pytest.CaptureFixture[str], **rows: Any) -> str:
    """What the checks of a run with these rows say; a prompt may have 156 tokens, and a character is one."""
    save_tokenizer(checkpoint)
    few = {"generation.max_new_tokens": 100, "env.reward.check_at_start": False}
    run = GRPO(checkpoint, reward=lambda response: 1.0, num_steps=1, overrides=few, **rows)
    try:
        run._check(str(checkpoint))
    except ConfigError as error:
        return str(error)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ({"train": [GOOD, {"prompt": 3}]}, "  - train cannot be used: train[1]: 'prompt' must be text or a"),
        (
            {"train": [GOOD], "validation": [GOOD, GOOD, {"prompt": " "}]},
            "  - validation cannot be used: validation[2]: 'prompt' is an empty prompt; fill it in",
        ),
        (
            {"train": [{"prompt": "1" * 157}]},
            "  - train cannot be used: all 1 prompts have more than 156 tok",
        ),
        (
            {"train": [{"prompt": "1" * 156}, GOOD, GOOD, {"prompt": "1" * 157}]},
            "warning: prompts of more than 156 tokens are left out, such as train[3]\n",
        ),
    ],
)
def test_what_is_wrong_with_a_row_names_its_argument_and_index(
    rows: Any, told: str, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(checkpoint, capsys, **rows)
    assert told in text
    assert ".jsonl" not in text


def test_rows_of_a_file_are_named_by_the_file(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt": "", "answer": ""}\n')
    told = said(checkpoint, capsys, train=tmp_path / "mine.jsonl")
    assert f"{tmp_path}/mine.jsonl:2: 'prompt' is an empty prompt" in told
