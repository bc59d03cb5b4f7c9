"""Digests of data: what changes a sample changes them, and nothing else does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

from nemo_like.data.content_digest import DigestedDataset, made_contents, record_contents
from nemo_like.data.datasets import build_sources
from nemo_like.data.images import Picture
from nemo_like.data.interface import Message, TaskPrompt
from nemo_like.data.options import DatasetConfig
from tests.unit.data.test_datasets import config

ROWS = [{"question": f"{number}+1", "solution": number + 1, "level": number % 3} for number in range(20)]


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def written(path: Path, rows: list[dict[str, Any]]) -> DatasetConfig:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
        return config("huggingface", path, split="train")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config("jsonl", path)


def digest(source: DatasetConfig, max_prompt_tokens: int = 100) -> str:
    sources = build_sources(
        [source],
        "train",
        prompt_lengths=lambda examples: [len(str(example.prompt)) for example in examples],
        max_prompt_tokens=max_prompt_tokens,
    )
    return sources.reports[0].digest


def test_a_file_that_moved_has_the_same_digest_whatever_its_format(tmp_path: Path) -> None:
    here = digest(written(tmp_path / "rows.jsonl", ROWS))
    assert digest(written(tmp_path / "elsewhere" / "renamed.jsonl", ROWS)) == here
    assert digest(written(tmp_path / "rows.parquet", ROWS)) == here
    assert digest(written(tmp_path / "other.jsonl", [dict(reversed(row.items())) for row in ROWS])) == here


def test_a_field_that_is_null_is_as_one_that_is_not_there(tmp_path: Path) -> None:
    """A table has the field in every row, lines of JSON only where it says something."""
    rows = [{**ROWS[0], "hint": "none"}, *ROWS]
    assert digest(written(tmp_path / "rows.jsonl", rows)) == digest(written(tmp_path / "rows.parquet", rows))


def test_an_older_file_has_the_same_digest(tmp_path: Path) -> None:
    source = written(tmp_path / "rows.jsonl", ROWS)
    now = digest(source)
    os.utime(tmp_path / "rows.jsonl", (1, 1))
    assert digest(source) == now


@pytest.mark.parametrize(
    "change", [{"question": "7 + 1"}, {"solution": 9}, {"level": 5}, {"hint": "none"}], ids=str
)
def test_another_prompt_answer_or_field_changes_the_digest(tmp_path: Path, change: dict[str, Any]) -> None:
    changed = [{**row, **(change if number == 7 else {})} for number, row in enumerate(ROWS)]
    assert digest(written(tmp_path / "a.jsonl", ROWS)) != digest(written(tmp_path / "b.jsonl", changed))


def test_another_order_changes_the_digest(tmp_path: Path) -> None:
    assert digest(written(tmp_path / "a.jsonl", ROWS)) != digest(written(tmp_path / "b.jsonl", ROWS[::-1]))


def test_what_the_configuration_puts_around_a_prompt_is_no_part_of_the_data(tmp_path: Path) -> None:
    plain = written(tmp_path / "rows.jsonl", ROWS)
    templated = config("jsonl", plain.path, prompt_template="Add: {prompt}", use_chat_template=True)
    assert digest(plain) == digest(templated)


def test_generated_problems_follow_from_their_settings() -> None:
    assert digest(config("arithmetic")) == digest(config("arithmetic"))
    assert digest(config("arithmetic")) != digest(config("arithmetic", digits=1))


_IN_ANOTHER_PROCESS = """
import json, sys
from nemo_like.data.content_digest import DigestedDataset, record_contents
from nemo_like.data.interface import TaskPrompt
data = {"tags": ["a", "b"], "n": {"z": 1, "a": 2.5}, "odd": {1, 2}}
print(DigestedDataset([TaskPrompt("p", "a", data)], record_contents).digest())
"""


def test_two_processes_agree() -> None:
    told = {
        subprocess.run(
            [sys.executable, "-c", _IN_ANOTHER_PROCESS],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(told) == 1


def of(*examples: TaskPrompt) -> str:
    return DigestedDataset(list(examples), record_contents).digest()  # type: ignore[arg-type]


def test_values_that_json_does_not_have_count() -> None:
    assert of(TaskPrompt("p", "a", {"day": date(2024, 1, 1)})) != of(
        TaskPrompt("p", "a", {"day": date(2024, 1, 2)})
    )
    assert of(TaskPrompt("p", "a", {"raw": b"1"})) != of(TaskPrompt("p", "a", {"raw": b"2"}))
    assert of(TaskPrompt("p", "a", {"any": object()})) == of(TaskPrompt("p", "a", {"any": object()}))


def test_messages_count_by_role_and_content() -> None:
    asked, told = (Message("user", "1+1"),), (Message("system", "1+1"),)
    assert of(TaskPrompt(asked, "2")) == of(TaskPrompt(asked, "2"))
    assert len({of(TaskPrompt(asked, "2")), of(TaskPrompt(told, "2")), of(TaskPrompt("1+1", "2"))}) == 3


def test_two_problems_are_not_one_that_looks_like_both() -> None:
    assert of(TaskPrompt("a", "b"), TaskPrompt("c", "d")) != of(TaskPrompt('a","b', "c"))


def test_an_image_counts_by_its_file_and_not_by_its_path(tmp_path: Path) -> None:
    def picture(name: str, colour: str) -> str:
        path = tmp_path / name
        Image.new("RGB", (8, 8), colour).save(path)
        return str(path)

    def told(source: str | bytes) -> str:
        return of(TaskPrompt("<image>", "a", images=(Picture(source, "record"),)))

    red, moved, blue = picture("a.bmp", "red"), picture("b.bmp", "red"), picture("c.bmp", "blue")
    assert told(red) == told(moved) == told(Path(red).read_bytes())
    assert told(red) != told(blue)
    assert told(str(tmp_path / "missing.png")) == told(b"")


def test_the_first_pass_makes_the_digest_and_later_reads_do_not_change_it() -> None:
    examples = [TaskPrompt(str(number), "a") for number in range(5)]
    read = DigestedDataset(examples, made_contents)  # type: ignore[arg-type]
    assert [read[index].prompt for index in (0, 1, 2, 0, 4)] == ["0", "1", "2", "0", "4"]
    assert read.digest() == DigestedDataset(examples, made_contents).digest() == read.digest()  # type: ignore[arg-type]
