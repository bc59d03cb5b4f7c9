from __future__ import annotations

import codecs
import json
from dataclasses import replace

import datasets
import pytest

from nemo_like.data.datasets import build_dataset
from nemo_like.data.interface import Message, TaskPrompt
from nemo_like.data.options import DatasetConfig

RECORDS = [
    {"question": "1+1", "solution": "2", "level": 1},
    {"question": "2+2", "solution": "4", "level": 2},
]
GOOD = json.dumps(RECORDS[0])


def config(kind, path=None, split=None, prompt_key="question", answer_key="solution", **changes):
    source = DatasetConfig(
        name=None,
        kind=kind,
        path=None if path is None else str(path),
        split=split,
        subset=None,
        prompt_key=prompt_key,
        answer_key=answer_key,
        images_key=None,
        digits=2,
        options={},
        chat_template_kwargs={},
        weight=1.0,
        prompt_template=None,
        use_chat_template=False,
        system_prompt=None,
        env="sums",
        difficulty_key=None,
        columns={},
    )
    return replace(source, **changes)


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture(autouse=True)
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def test_arithmetic_needs_no_file():
    dataset = build_dataset(config("arithmetic"), "validation")
    assert len(dataset) > 900
    assert dataset[0].prompt.endswith("=")


def test_jsonl_gives_prompt_answer_and_the_other_fields_as_data(tmp_path):
    path = write_jsonl(tmp_path / "problems.jsonl", RECORDS)
    dataset = build_dataset(config("jsonl", path), "train")
    assert len(dataset) == 2
    assert dataset[1] == TaskPrompt("2+2", "4", {"level": 2}, env="sums")


def test_an_answer_that_is_a_number_becomes_text(tmp_path):
    path = write_jsonl(tmp_path / "problems.jsonl", [{"question": "1+1", "solution": 2}])
    assert build_dataset(config("jsonl", path), "train")[0].answer == "2"


def test_messages_become_a_conversation(tmp_path):
    record = {"question": [{"role": "user", "content": "1+1"}], "solution": "2"}
    path = write_jsonl(tmp_path / "problems.jsonl", [record])
    assert build_dataset(config("jsonl", path), "train")[0].prompt == (Message("user", "1+1"),)


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
OTHER_CALL = {"id": "c2", "type": "function", "function": {"name": "sub", "arguments": {"b": "x"}}}


def asked_with(call):
    return {
        "question": [
            {"role": "user", "content": "1+2?", "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "?"},
            {"role": "tool", "content": "3", "tool_call_id": call["id"]},
        ],
        "solution": "3",
    }


def problems_with_calls(call):
    return (
        Message("user", "1+2?", {"name": "ann"}),
        Message("assistant", "", {"tool_calls": [call], "reasoning_content": "?"}),
        Message("tool", "3", {"tool_call_id": call["id"]}),
    )


def test_messages_keep_all_of_their_fields(tmp_path):
    path = write_jsonl(tmp_path / "problems.jsonl", [asked_with(CALL), asked_with(OTHER_CALL)])
    dataset = build_dataset(config("jsonl", path), "train")
    assert [dataset[0].prompt, dataset[1].prompt] == [
        problems_with_calls(CALL),
        problems_with_calls(OTHER_CALL),
    ]
    assert dataset[1].where == f"{path}:2"


def test_a_table_adds_no_fields_to_messages_and_no_arguments_to_calls(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    rows = datasets.Dataset.from_list([asked_with(CALL), asked_with(OTHER_CALL)])
    assert rows[0]["question"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}
    rows.to_parquet(directory / "train.parquet")
    dataset = build_dataset(config("huggingface", directory, split="train"), "train")
    assert [dataset[0].prompt, dataset[1].prompt] == [
        problems_with_calls(CALL),
        problems_with_calls(OTHER_CALL),
    ]


def test_blank_lines_are_skipped(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps(RECORDS[0]) + "\n\n" + json.dumps(RECORDS[1]) + "\n")
    assert len(build_dataset(config("jsonl", path), "train")) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "1+1"}\n', "problems.jsonl:1: no field 'solution' .*answer_key.*it has 'question'"),
        ('{"question": 5, "solution": "x"}\n', "'question' must be text or a list of messages"),
        ('{"question": "1", "solution": "x"}\n{"question\n', r"problems.jsonl:2: not valid JSON"),
        ("[1]\n", "problems.jsonl:1: a line must be a JSON object, not list"),
        ("", "holds no problems"),
        (
            f"{GOOD}\n" + '{"question": "", "solution": "x"}\n',
            r":2: 'question' is an empty prompt",
        ),
        (f"{GOOD}\n\n" + '{"question": [], "solution": "x"}\n', r"problems.jsonl:3: .* is an empty prompt"),
        (
            '{"question": [{"role": "user", "content": null}], "solution": ""}\n',
            ":1: .* both text, not ",
        ),
        (
            '{"question": [{"role": "assistant", "tool_calls": [{"id": 1}]}], "solution": ""}\n',
            ":1: .* both text, not .*: message 1: a tool call needs a function with name and arguments",
        ),
        ('{"question": "\\ud83d", "solution": "x"}\n', r"problems.jsonl:1: \\ud83d is half of a surrogate"),
        (f"{GOOD}\n".encode() + b'{"question": "\xe9"}\n', r"problems.jsonl:2: not UTF-8 \(byte 0xe9"),
        (f"{GOOD}\n".encode("utf-16"), r"problems.jsonl:1: not UTF-8 \(byte 0xff"),
    ],
)
def test_a_malformed_file_is_an_error_that_says_where(tmp_path, content, message):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=message):
        dataset = build_dataset(config("jsonl", path), "train")
        [dataset[index] for index in range(len(dataset))]


def test_a_byte_order_mark_and_both_halves_of_a_surrogate_pair_are_read(tmp_path):
    path = tmp_path / "problems.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b'{"question": "\\ud83d\\ude00", "solution": null}\n')
    dataset = build_dataset(config("jsonl", path), "train")
    assert dataset[0] == TaskPrompt("\U0001f600", "", {}, env="sums")


def test_a_missing_file_is_an_error_with_its_path(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere.jsonl' is not a file"):
        build_dataset(config("jsonl", tmp_path / "nowhere.jsonl"), "train")


@pytest.mark.parametrize("kind", ["jsonl", "huggingface"])
def test_a_null_path_is_an_error_naming_the_key(kind):
    with pytest.raises(ValueError, match=r"data.validation.path is null"):
        build_dataset(config(kind), "validation")


def test_huggingface_reads_a_local_file(tmp_path):
    path = write_jsonl(tmp_path / "problems.jsonl", RECORDS)
    dataset = build_dataset(config("huggingface", path, split="train"), "train")
    assert dataset[1] == TaskPrompt("2+2", "4", {"level": 2}, env="sums")


def test_huggingface_reads_a_directory_of_data_files(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    datasets.Dataset.from_list(RECORDS).to_parquet(directory / "train.parquet")
    dataset = build_dataset(config("huggingface", directory, split="train"), "train")
    assert [dataset[i].answer for i in range(len(dataset))] == ["2", "4"]


def test_huggingface_reads_what_save_to_disk_wrote(tmp_path):
    saved = datasets.DatasetDict({"test": datasets.Dataset.from_list(RECORDS)})
    saved.save_to_disk(tmp_path / "saved")
    dataset = build_dataset(config("huggingface", tmp_path / "saved", split="test"), "validation")
    assert dataset[0] == TaskPrompt("1+1", "2", {"level": 1}, env="sums")
    with pytest.raises(ValueError, match=r"split='train' is not in .*, which has test"):
        build_dataset(config("huggingface", tmp_path / "saved", split="train"), "train")


def test_huggingface_needs_a_split(tmp_path):
    with pytest.raises(ValueError, match=r"data.train.split is null"):
        build_dataset(config("huggingface", tmp_path), "train")


ANSWERS = {3.0: "3", 1e-05: "0.00001", 0.1: "0.1", 640.0: "640"}


def numbered(count=10):
    return [{"question": f"{n}+0", "solution": str(n), "level": n % 2} for n in range(count)]


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "csv"])
def test_numbers_are_answers_as_a_model_writes_them_whatever_the_file(tmp_path, ending):
    records, path = [{"question": "?", "solution": value} for value in ANSWERS], tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        kind = "jsonl"
        write_jsonl(path, records)
    else:
        kind = "huggingface"
        rows = datasets.Dataset.from_list(records)
        rows.to_parquet(path) if ending == "parquet" else rows.to_csv(path)
    dataset = build_dataset(config(kind, path, split="train"), "train")
    assert [dataset[index].answer for index in range(len(dataset))] == list(ANSWERS.values())


def test_short_floats_are_answers_by_their_own_decimals(tmp_path):
    features = datasets.Features(
        {"question": datasets.Value("string"), "solution": datasets.Value("float32")}
    )
    rows = [{"question": "?", "solution": value} for value in ANSWERS]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    dataset = build_dataset(config("huggingface", tmp_path / "rows.parquet", split="train"), "train")
    assert [dataset[index].answer for index in range(len(dataset))] == list(ANSWERS.values())


@pytest.mark.parametrize("value", [["2"], {"value": 2}])
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_list_or_a_mapping_is_no_answer_and_is_refused_by_file_and_row(tmp_path, value, ending):
    records, path = [{"question": "?", "solution": value}], tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        source, where = config("jsonl", write_jsonl(path, records)), r"rows\.jsonl:1"
    else:
        datasets.Dataset.from_list(records).to_parquet(path)
        source = config("huggingface", path, split="train")
        where = r"rows\.parquet \[train\], record 0"
    with pytest.raises(ValueError, match=where + ", field 'solution': the answer is"):
        build_dataset(source, "train")


SLICES = {
    "train": range(10),
    "train[:3]": range(3),
    "train[-2:]": range(8, 10),
    "train[20%:50%]": range(2, 5),
    "train[:1]+train[4:6]": [0, 4, 5],
}


def prompts_of(source):
    dataset = build_dataset(source, "train")
    return [dataset[index].prompt for index in range(len(dataset))]


@pytest.mark.parametrize("where", ["jsonl", "file", "folder", "saved", "saved parts"])
@pytest.mark.parametrize("split", SLICES)
def test_a_slice_chooses_the_same_rows_of_files_folders_and_saved_datasets(tmp_path, where, split):
    path, rows = tmp_path / "data", datasets.Dataset.from_list(numbered())
    path.mkdir()
    kind = "huggingface"
    if where == "jsonl":
        kind, path = "jsonl", write_jsonl(path / "rows.jsonl", numbered())
    elif where == "file":
        path = write_jsonl(path / "rows.jsonl", numbered())
    elif where == "folder":
        write_jsonl(path / "train.jsonl", numbered())
        write_jsonl(path / "test.jsonl", numbered(2))
    elif where == "saved":
        rows.save_to_disk(path)
    else:
        datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(path)
    chosen = [f"{number}+0" for number in SLICES[split]]
    assert prompts_of(config(kind, path, split=split)) == chosen


def test_a_record_of_a_slice_is_told_by_its_line_of_the_file(tmp_path):
    records = numbered()
    records[5]["question"] = ""
    path = write_jsonl(tmp_path / "rows.jsonl", records)
    dataset = build_dataset(config("jsonl", path, split="train[4:]"), "train")
    with pytest.raises(ValueError, match=r"rows\.jsonl:6: 'question' is an empty prompt"):
        dataset[1]


@pytest.mark.parametrize(
    ("split", "told"),
    [
        ("train[:3", r"split='train\[:3' cannot be read from .*Unrecognized instruction"),
        ("train[:3]+test[:3]", r"names 2 parts, and .*rows\.jsonl' is a single one"),
        ("train[5:3]", r"rows\.jsonl holds no problems"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "huggingface"])
def test_a_slice_that_cannot_be_read_is_refused(tmp_path, kind, split, told):
    path = write_jsonl(tmp_path / "rows.jsonl", numbered())
    with pytest.raises(ValueError, match=told):
        build_dataset(config(kind, path, split=split), "train")


def configured(path):
    """A directory of data files with two configurations, as datasets on the hub have them."""
    path.mkdir()
    for name, count in (("main", 10), ("socratic", 4)):
        write_jsonl(path / f"{name}.jsonl", numbered(count))
    entries = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("main", "socratic"))
    (path / "README.md").write_text(f"---\nconfigs:\n{entries}---\n")
    return path


def test_a_subset_names_one_of_several_configurations(tmp_path):
    path = configured(tmp_path / "gsm")
    source = config("huggingface", path, split="train", subset="socratic")
    assert len(prompts_of(source)) == 4
    assert len(prompts_of(replace(source, subset="main", split="train[:3]"))) == 3
    for subset in (None, "other"):
        with pytest.raises(ValueError, match=r"\['main', 'socratic'\](.|\n)*data\.\*\.subset names one"):
            build_dataset(replace(source, subset=subset), "train")


def test_a_saved_dataset_has_no_subsets(tmp_path):
    datasets.Dataset.from_list(numbered()).save_to_disk(tmp_path / "saved")
    with pytest.raises(ValueError, match=r"subset='main': .* has no subsets"):
        build_dataset(config("huggingface", tmp_path / "saved", split="train", subset="main"), "train")


NESTED = [
    {
        "prompt": [{"role": "user", "content": "1+1"}],
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"index": index},
    }
    for index, answer in enumerate(["2", "3"])
]


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_a_key_with_dots_names_a_field_inside_a_mapping(tmp_path, ending):
    path, keys = tmp_path / f"rows.{ending}", {"prompt_key": "prompt"}
    if ending == "jsonl":
        kind, path = "jsonl", write_jsonl(path, NESTED)
    else:
        kind = "huggingface"
        datasets.Dataset.from_list(NESTED).to_parquet(path)
    source = config(kind, path, "train", answer_key="reward_model.ground_truth", **keys)
    first = build_dataset(source, "train")[0]
    assert (first.prompt, first.answer) == ((Message(role="user", content="1+1"),), "2")
    assert first.data == {"reward_model": NESTED[0]["reward_model"], "extra_info": {"index": 0}}
    wrong = config(kind, path, "train", answer_key="reward_model.truth", **keys)
    rule = r"no field 'reward_model.truth' \(data.\*.answer_key\); 'reward_model' has 'ground_truth', 'style'"
    with pytest.raises(ValueError, match=rule):
        build_dataset(wrong, "train")
    elsewhere = config(kind, path, "train", answer_key="rewards.truth", **keys)
    with pytest.raises(ValueError, match="it has 'extra_info', 'prompt', 'reward_model'"):
        build_dataset(elsewhere, "train")


def test_a_field_whose_own_name_has_dots_comes_first(tmp_path):
    record = {"question": "1+1", "a.b": "2", "a": {"b": "3"}}
    path = write_jsonl(tmp_path / "rows.jsonl", [record])
    assert build_dataset(config("jsonl", path, answer_key="a.b"), "train")[0].answer == "2"


def test_short_floats_inside_a_mapping_are_answers_by_their_own_decimals(tmp_path):
    inner = {"truth": datasets.Value("float32"), "style": datasets.Value("string")}
    features = datasets.Features({"question": datasets.Value("string"), "reward": inner})
    rows = [{"question": "?", "reward": {"truth": value, "style": "x"}} for value in ANSWERS]
    datasets.Dataset.from_list(rows, features=features).to_parquet(tmp_path / "rows.parquet")
    source = config("huggingface", tmp_path / "rows.parquet", split="train", answer_key="reward.truth")
    dataset = build_dataset(source, "train")
    assert [dataset[index].answer for index in range(len(dataset))] == list(ANSWERS.values())
