from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_like.configuration import Config
from nemo_like.data.sources import data_sources
from nemo_like.preflight.data_scan import ScanReport, ScanRequest, SourceToScan, scan
from nemo_like.rollout.tasks import max_prompt_tokens
from scripts.demo_model.shapes import write_records
from scripts.demo_model.tiny_tokenizer import save_tokenizer
from scripts.demo_model.tiny_vlm import VISION_TOKENS, image_processor, tiny_vlm_config
from tests.unit.environments.configs import env_config

GOOD = {"prompt": "1+1=", "answer": "2"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(directory)
    return str(directory)


@pytest.fixture
def look(demo: Callable[..., Config], tmp_path: Path, tokenizer: str) -> Callable[..., ScanReport]:
    """``look(records)``: what the scan says of a file with these lines; 28 tokens are the limit."""

    def look(
        records: Sequence[Mapping[str, Any] | str | bytes],
        *arguments: str,
        time_s: float = 60.0,
        with_tokenizer: bool = True,
        env: Any = None,
        num_drawn: float = 0,
    ) -> ScanReport:
        path = tmp_path / "problems.jsonl"
        path.write_bytes(b"".join(_line(record) + b"\n" for record in records))
        one_source = ("data.default.kind=jsonl", f"data.default.path={path}", "data.train=[{}]")
        cfg = demo(*one_source, *arguments)
        sources = tuple(
            SourceToScan(
                key=key,
                cfg=source,
                split="train",
                environments={source.env: env or cfg.env[source.env]},
                num_drawn=num_drawn,
            )
            for key, source in data_sources(cfg.data)
            if key.startswith("data.train")
        )
        return scan(
            ScanRequest(
                sources=sources,
                tokenizer=tokenizer if with_tokenizer else None,
                chat_template=cfg.data.chat_template,
                max_prompt_tokens=max_prompt_tokens(cfg),
                time_s=time_s,
            )
        )

    return look


def _line(record: Mapping[str, Any] | str | bytes) -> bytes:
    if isinstance(record, bytes):
        return record
    return (record if isinstance(record, str) else json.dumps(record)).encode()


Look = Callable[..., ScanReport]


def test_the_first_prompts_that_are_too_long_have_their_places_noted(look: Look, tmp_path: Path) -> None:
    long = {"prompt": "1" * 29, "answer": "2"}
    (note,) = look([GOOD, *[long] * 6]).notes
    assert note.too_long == tuple(f"{tmp_path}/problems.jsonl:{line}" for line in (2, 3, 4, 5, 6))
    assert str(note).endswith("of 29 prompt tokens at most; 6 of more than 28 are left out")


def test_good_records_are_counted_with_their_longest_prompt(look: Look, tmp_path: Path) -> None:
    report = look([GOOD, {"prompt": "12+34=", "answer": "46"}])
    assert report.problems == ()
    assert [str(note) for note in report.notes] == [
        f"checked      data.train: all 2 problems of {tmp_path}/problems.jsonl, of 6 prompt tokens at most"
    ]


def test_it_is_said_how_often_the_run_goes_through_the_problems(look: Look) -> None:
    records = [GOOD, GOOD, GOOD, GOOD, {"prompt": "1" * 29, "answer": "2"}]  # the last is left out
    (note,) = look(records, num_drawn=10).notes
    assert str(note).endswith("are left out; the run's steps draw 10, which is 2.5 epochs")
    (note,) = look(records, num_drawn=10_240).notes
    assert str(note).endswith("draw 10,240, which is 2,560 epochs")


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ('{"prompt": "1+', "problems.jsonl:6: not valid JSON: "),
        ("[1]", "problems.jsonl:6: a line must be a JSON object, not list"),
        ({"prompt": "", "answer": "2"}, "problems.jsonl:6: 'prompt' is an empty prompt; fill it in"),
        ({"prompt": " \n", "answer": "2"}, "problems.jsonl:6: 'prompt' is an empty prompt"),
        ({"answer": "2"}, "problems.jsonl:6: no field 'prompt'"),
        ({"prompt": "1", "answer": None}, "problems.jsonl:6: env.arithmetic cannot judge it: the reference"),
        ({"prompt": "1", "answer": ["2"]}, "problems.jsonl:6, field 'answer': the answer is ['2'] (list)"),
        (
            {"prompt": "1", "answer": {"x": 2}},
            "problems.jsonl:6, field 'answer': the answer is {'x': 2} (dict",
        ),
        ('{"prompt": "1", "answer": NaN}', "problems.jsonl:6, field 'answer': the answer is nan, which no"),
        ('{"prompt": "\\udc00", "answer": "2"}', "problems.jsonl:6: \\udc00 is half of a surrogate pair"),
        (b'{"prompt": "\xe9", "answer": "2"}', "problems.jsonl:6: not UTF-8 (byte 0xe9 at position 13)"),
    ],
)
def test_a_bad_record_is_told_with_file_and_line(look: Look, tmp_path: Path, bad: Any, problem: str) -> None:
    (found,) = look([*[GOOD] * 5, bad, GOOD]).problems
    path = tmp_path / "problems.jsonl"
    assert found.key == f"data.train.path={path}"
    assert f"cannot be used: {tmp_path}/{problem}" in str(found)


def test_a_slice_of_a_file_is_all_that_is_looked_at(look: Look) -> None:
    report = look([*[GOOD] * 3, {"prompt": ""}], "data.default.split='train[1:3]'")
    assert report.problems == ()
    assert "all 2 problems of" in str(report.notes[0])


def test_a_prompt_that_the_template_refuses_is_told_once_however_many_follow(
    look: Look, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}{{ raise_exception('no') }}{% endfor %}")
    records = [
        {"prompt": [{"role": "user", "content": f"{number}"}], "answer": "1"} for number in range(2100)
    ]
    (found,) = look(records, f"data.chat_template={template}").problems
    assert "problems.jsonl:1: the chat template refuses the messages: no" in str(found)


def test_an_empty_file_has_no_problems_to_train_on(look: Look) -> None:
    (found,) = look([]).problems
    assert "cannot be used: it holds no problems" in str(found)


def test_prompts_that_are_all_too_long_are_refused_and_some_are_left_out(look: Look) -> None:
    long = {"prompt": "1+" * 15, "answer": "2"}
    (found,) = look([long, long]).problems
    assert "all 2 prompts have more than 28 tokens; raise policy.max_total_sequence_length" in str(found)
    report = look([long, GOOD])
    assert report.problems == ()
    assert str(report.notes[0]).endswith("of 30 prompt tokens at most; 1 of more than 28 are left out")


def test_what_is_put_around_a_prompt_counts(look: Look) -> None:
    (found,) = look([GOOD], "data.default.prompt_template='please answer the question {prompt}'").problems
    assert "all 1 prompts have more than 28 tokens" in str(found)


def test_messages_without_a_chat_template_are_found(look: Look) -> None:
    (found,) = look([{"prompt": [{"role": "user", "content": "1"}], "answer": "2"}]).problems
    assert "the tokenizer has no chat template" in str(found)


CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CALLED = [
    {"role": "user", "content": "1"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "?"},
    {"role": "tool", "content": "2", "tool_call_id": "1"},
]
WITHOUT_CALLS = "{% for m in messages %}{{ m.content }}{% endfor %}="
WITH_CALLS = (
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{% endfor %}="
)


def test_calls_that_the_chat_template_leaves_out_are_told_with_file_and_line(
    look: Look, tmp_path: Path
) -> None:
    template, path = tmp_path / "template.jinja", tmp_path / "problems.jsonl"
    template.write_text(WITHOUT_CALLS)
    records = [GOOD, {"prompt": CALLED, "answer": "2"}]
    (found,) = look(records, f"data.chat_template={template}").problems
    assert f"cannot be used: {path}:2: the chat template leaves out the call of 'add' of message 2" in str(
        found
    )
    template.write_text(WITH_CALLS)
    report = look(records, f"data.chat_template={template}")
    assert report.problems == ()
    assert str(report.notes[-1]) == (
        "checked      data: the chat template leaves out reasoning_content of some prompts; the policy does "
        "not read it"
    )


def test_messages_that_the_chat_template_refuses_are_told_with_file_and_line(
    look: Look, tmp_path: Path
) -> None:
    template, path = tmp_path / "template.jinja", tmp_path / "problems.jsonl"
    template.write_text(
        "{% if messages | length > 1 %}{{ raise_exception('only one') }}{% endif %}" + WITH_CALLS
    )
    (found,) = look(
        [{"prompt": CALLED[:1], "answer": "2"}, {"prompt": CALLED, "answer": "2"}],
        f"data.chat_template={template}",
    ).problems
    assert f"cannot be used: {path}:2: the chat template refuses the messages: only one" in str(found)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"role": "assistant", "tool_calls": [{"id": "1"}]},
            "message 2: a tool call needs a function with name",
        ),
        (CALLED[1], "message 2: the prompt ends in a call of a tool; add its result"),
        ({"from": "human", "value": "1"}, "message 2: its role is None and its content None"),
    ],
)
def test_messages_of_another_form_are_told_with_file_and_line(
    look: Look, tmp_path: Path, message: Any, reason: str
) -> None:
    (found,) = look([GOOD, {"prompt": [CALLED[0], message], "answer": "2"}]).problems
    assert f"cannot be used: {tmp_path}/problems.jsonl:2: 'prompt' must be text or a list of messages" in str(
        found
    )
    assert reason in str(found)


def test_without_a_tokenizer_records_are_checked_and_lengths_are_not(look: Look) -> None:
    report = look([GOOD], with_tokenizer=False)
    assert report.problems == ()
    assert "prompt tokens" not in str(report.notes[0])


def test_where_time_is_short_the_notes_say_how_far_it_got(look: Look) -> None:
    report = look([GOOD] * 1500 + ["no JSON"], time_s=0.0)
    assert report.problems == ()
    checked, rest = map(str, report.notes)
    assert checked.startswith("checked      data.train: the first 1,000 problems of ")
    assert rest.startswith("not checked  data.train: the problems of ")


def test_every_source_is_told_by_its_own_key(look: Look, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text("no JSON\n")
    report = look([GOOD], f"data.train=[{{}}, {{path: {other}}}]")
    (found,) = report.problems
    assert str(found).startswith(f"data.train[1].path={other} cannot be used: {other}:1: not valid JSON")
    assert str(report.notes[0]).startswith("checked      data.train[0]: all 1 problems")


def test_at_most_three_records_of_a_source_are_told(look: Look) -> None:
    assert len(look([{"prompt": "1", "answer": ""}] * 10).problems) == 3


def test_a_tokenizer_that_cannot_be_loaded_is_told(look: Look, tokenizer: str, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).touch()
    request = ScanRequest(
        sources=(), tokenizer=str(broken), chat_template=None, max_prompt_tokens=9, time_s=1.0
    )
    (found,) = scan(request).problems
    assert str(found).startswith(f"policy.model_name={broken} has a tokenizer that cannot be loaded")


@pytest.mark.parametrize(
    ("kind", "record", "problem"),
    [
        ("exact_match", {"answer": " "}, "the reference answer is empty"),
        ("math_verify", {"answer": ""}, "the reference answer is empty"),
        ("calculator", {"answer": ""}, "the reference answer is empty"),
        ("code", {"answer": "2"}, "no field 'tests' (options.tests_key), which the environment needs"),
        ("code", {"answer": "2", "tests": []}, "the field 'tests' (options.tests_key) has no tests"),
        (
            "code",
            {"answer": "", "tests": "import math\nassert Stack().size() == 0"},
            "the tests in the field 'tests' cannot be run by value: line 2: they use the attribute size",
        ),
        ("sliding_puzzle", {"answer": "", "level": 1}, "needs; there are: 'level'"),
        ("sliding_puzzle", {"answer": "", "board": "12"}, "must be rows of one length with one blank"),
        ("json_schema", {"answer": ""}, "no field 'schema' (options.schema_key)"),
        (
            "json_schema",
            {"answer": "", "schema": {"type": "objekt"}},
            "no JSON schema: 'objekt' is not",
        ),
    ],
)
def test_a_record_without_what_its_judge_needs_is_told(
    look: Look, kind: str, record: dict[str, Any], problem: str
) -> None:
    found = look([{"prompt": "1+1=", **record}], env=env_config(kind)).problems
    assert [problem in str(each) for each in found] == [True]


@pytest.mark.parametrize(
    ("kind", "record"),
    [
        ("f1", {"answer": ""}),
        ("math_verify", {"answer": "\\frac{1}{2}"}),
        ("code", {"answer": "", "tests": [{"input": "1", "output": "1"}]}),
        ("code", {"answer": "", "tests": "assert double(3) == 6"}),
        ("sliding_puzzle", {"answer": "", "board": "21\n3-"}),
        ("json_schema", {"answer": "", "schema": {"type": "object"}}),
        ("json_schema", {"answer": "", "schema": '{"type": "object"}'}),
    ],
)
def test_a_record_with_what_its_judge_needs_passes(look: Look, kind: str, record: dict[str, Any]) -> None:
    assert look([{"prompt": "1+1=", **record}], env=env_config(kind)).problems == ()


def test_a_judge_needs_a_reference_answer_where_it_is_asked_about_one(look: Look) -> None:
    there = {"base_url": "http://judge", "model": "m"}
    empty = {"prompt": "1+1=", "answer": ""}
    for kind, options, is_needed in (
        ("judge", there, True),
        ("judge", {**there, "prompt": "rate {response}"}, False),
        ("preference", there, True),
    ):
        problems = look([empty], env=env_config(kind, options=options)).problems
        assert ["the reference answer is empty" in str(each) for each in problems] == [True] * is_needed


def test_a_record_s_columns_are_looked_at(look: Look) -> None:
    columns = "{level: int8, weights: per_token float32}"
    records = [
        {**GOOD, "level": 1, "weights": [1, 0.5, 0, 1]},
        {**GOOD, "level": 0.5, "weights": [1, 0.5, 0, 1]},
        {**GOOD, "level": 1, "weights": [1]},
    ]
    first, second = look(records, f"++data.default.columns={columns}").problems
    assert "problems.jsonl:2: column 'level' is declared int8, which cannot hold" in str(first)
    assert "problems.jsonl:3: column 'weights' has shape [1], where [4] is declared for 4 tokens" in str(
        second
    )
    (missing,) = look([GOOD], f"++data.default.columns={columns}").problems
    assert "problems.jsonl:1: no field 'level' (data.*.columns)" in str(missing)


def test_every_image_is_decoded_and_one_that_cannot_be_is_named_with_file_and_row(
    demo: Callable[..., Config], tmp_path: Path
) -> None:
    tiny_vlm_config().save_pretrained(tmp_path)
    image_processor().save_pretrained(tmp_path)
    save_tokenizer(tmp_path, VISION_TOKENS)
    write_records(tmp_path, "shapes", 4, 0, 56)
    picture = (tmp_path / "shapes" / "00002.png").read_bytes()
    (tmp_path / "shapes" / "00001.png").unlink()
    (tmp_path / "shapes" / "00002.png").write_bytes(picture[: len(picture) // 2])
    arguments = f"{{kind: jsonl, path: {tmp_path / 'shapes.jsonl'}, images_key: images, env: arithmetic}}"
    cfg = demo(f"data.train=[{arguments}]")
    source = SourceToScan(
        key="data.train",
        cfg=cfg.data.train[0],
        split="train",
        environments={"arithmetic": env_config("exact_match")},
    )

    def report(max_prompt_tokens: int) -> ScanReport:
        return scan(
            ScanRequest(
                sources=(source,),
                tokenizer=str(tmp_path),
                chat_template=None,
                max_prompt_tokens=max_prompt_tokens,
                time_s=60.0,
            )
        )

    missing, broken = map(str, report(20).problems)
    assert "shapes.jsonl:2, image 1: " in missing
    assert "00001.png cannot be read (No such file or directory)" in missing
    assert "shapes.jsonl:3, image 1: " in broken
    assert "is no image that can be read" in broken
    too_large = str(report(3).problems[0])
    assert "shapes.jsonl:1, image 1: 56 x 56 pixels take 4 tokens, and a prompt has at most 3" in too_large
