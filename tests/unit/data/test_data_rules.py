from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.configuration import Config
from nemo_like.data.data_rules import data_problems
from nemo_like.data.options import source_name
from nemo_like.data.sources import data_sources

Demo = Callable[..., Config]


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("data.train.digits=4", "data.train.digits=4 must be at least 1 and at most 3"),
        ("data.train.weight=0.0", "data.train.weight=0 must be above 0; leave out a source"),
        ("data.train.prompt_template=question", "data.train.prompt_template='question' must say where"),
        ("data.train.system_prompt=brief", "data.train.system_prompt='brief' needs a conversation"),
        ("data.train=[]", "data.train=[] must have at least one source"),
        (
            "data.validation=null",
            "data.validation=[] must have at least one source; a run without held-out problems has "
            "data.validation='${data.train}', with grpo.val_period=0",
        ),
        ("data.validation=[{}, {}]", "data.validation has 2 sources called arithmetic"),
        ("data.validation=[{}, {name: b, digits: 9}]", "data.validation[1].digits=9 must be at least 1"),
        ("data.max_input_seq_length=0", "data.max_input_seq_length=0 must be at least 1"),
        (
            "++data.train.columns={level: float32}",
            "data.train.columns names fields of records, and kind=arith",
        ),
        ("data.chat_template=/nowhere.jinja", "data.chat_template=/nowhere.jinja is not a file"),
        ("data.train.subset=main", "data.train.subset=main is of datasets of the hub, and would not be read"),
        (
            "data.train.split='train[:9]'",
            "data.train.split=train[:9] chooses rows of a dataset, and kind=arith",
        ),
    ],
)
def test_what_cannot_be_read_or_asked_is_refused(demo: Demo, argument: str, problem: str) -> None:
    (found,) = data_problems(demo(argument).data)
    assert str(found).startswith(problem)


@pytest.mark.parametrize(
    ("source", "is_missing"),
    [
        ("kind: jsonl, path: no/such.jsonl", True),
        ("kind: huggingface, split: train, path: no/such.parquet", True),
        ("kind: huggingface, split: train, path: /no/such/directory", True),
        ("kind: huggingface, split: train, path: openai/gsm8k", False),  # a name on the hub
    ],
)
def test_files_must_be_here_unless_the_run_will_be_elsewhere(
    demo: Demo, source: str, is_missing: bool
) -> None:
    cfg = demo(f"data.train={{{source}}}")
    found = [str(problem) for problem in data_problems(cfg.data)]
    assert [" is not a file; give a" in problem for problem in found] == [True] * is_missing
    assert list(data_problems(cfg.data, must_be_here=False)) == []


@pytest.mark.parametrize(
    ("name", "what"), [("a.csv", ".csv file"), ("a.json", "JSON list"), ("folder", "folder")]
)
def test_what_has_no_json_lines_names_the_kind_that_reads_it(
    demo: Demo, tmp_path: Path, name: str, what: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.csv").write_text("prompt,answer\n1+1=,2\n")
    (tmp_path / "a.json").write_text('\n [{"prompt": "1+1=", "answer": "2"}]')
    (problem, *_) = data_problems(demo(f"data.train={{kind: jsonl, path: {tmp_path}/{name}}}").data)
    assert str(problem) == (
        f"data.train.path={tmp_path}/{name} is a {what}, where kind=jsonl needs one JSON object per line; "
        f"set data.train.kind=huggingface, which reads such {what}s"
    )


def test_an_empty_path_is_a_missing_one(demo: Demo) -> None:
    (problem,) = data_problems(demo("data.train.kind=jsonl", "data.train.path=''").data)
    assert str(problem).startswith("data.train.path= must be set for data.train.kind=jsonl; give a file with")


def test_a_file_needs_no_split_and_a_folder_does(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\n1+1=,2\n")
    assert (
        list(data_problems(demo(f"data.train={{kind: huggingface, path: {tmp_path}/rows.csv}}").data)) == []
    )
    (problem,) = data_problems(demo(f"data.train={{kind: huggingface, path: {tmp_path}}}").data)
    assert str(problem).startswith("data.train.split=null must be set")


def test_a_file_has_no_subset(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").touch()
    source = f"kind: huggingface, split: train, subset: main, path: {tmp_path}/rows.parquet"
    (found,) = data_problems(demo(f"data.train={{{source}}}").data)
    assert str(found).endswith("rows.parquet is a file; set it to null")
    on_the_hub = "{kind: huggingface, split: 'train[:9]', subset: main, path: openai/gsm8k}"
    assert list(data_problems(demo(f"data.train={on_the_hub}").data)) == []


def test_several_sources_of_every_kind_of_prompt_are_accepted(demo: Demo) -> None:
    chat = "{name: chat, use_chat_template: true, system_prompt: brief, prompt_template: 'Q: {prompt}'}"
    assert list(data_problems(demo(f"data.train=[{{name: plain, weight: 0.5}}, {chat}]").data)) == []


def test_sources_are_called_by_their_name_their_file_or_their_kind(demo: Demo) -> None:
    sources = "data.train=[{name: mine}, {kind: jsonl, path: data/easy.jsonl}, {}]"
    named = {key: source_name(source) for key, source in data_sources(demo(sources).data)}
    assert named == {
        "data.train[0]": "mine",
        "data.train[1]": "easy",
        "data.train[2]": "arithmetic",
        "data.validation": "arithmetic",
    }


@pytest.mark.parametrize("text", ["float", "float32[", "bfloat16", "per_token ragged", "per_sample int8", ""])
def test_what_is_no_column_is_refused(demo: Demo, text: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2", "level": 1}\n')
    cfg = demo(
        "data.train.kind=jsonl", f"data.train.path={path}", f"++data.train.columns={{level: '{text}'}}"
    )
    (found,) = data_problems(cfg.data)
    assert str(found).startswith(f"data.train.columns.level={text} is no column; write a dtype")


def test_a_column_of_a_field_that_records_lack_is_refused(demo: Demo, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    cfg = demo("data.train.kind=jsonl", f"data.train.path={path}", "++data.train.columns={level: int8}")
    (found,) = data_problems(cfg.data)
    assert "data.train.columns=level is not a field of" in str(found)
