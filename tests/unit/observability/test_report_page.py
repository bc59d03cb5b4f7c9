"""What the report's page holds, by hand-made files; a browser looks at it in tests/functional."""

from __future__ import annotations

import base64
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from nemo_like.observability.run_directory import RunDirectory
from nemo_like_tools.report import run_page
from nemo_like_tools.report.report_recorder import ReportRecorder
from nemo_like_tools.report.run_page import RunData, chosen_files, write_comparison, write_report
from nemo_like_tools.report.sample_files import ReportProblem, SampleFile, sample_files
from scripts.report import main


def sample(group: int, generation: int, **changes: Any) -> dict[str, Any]:
    line = {
        "group": group,
        "generation": generation,
        "outcome": "trained",
        "env": "sums",
        "source": "pairs",
        "index": group + 10,
        "prompt": f"{group}+1=",
        "turns": [{"role": "assistant", "content": "\u2028</script>\n"}],
        "rewards": {"exact": 1.0},
        "failure": None,
        "reward": 1.0,
        "num_response_tokens": 3,
    }
    return {**line, **changes}


def write(run: Path, name: str, lines: list[dict[str, Any]]) -> Path:
    path = run / "rollouts" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = tmp_path / "run"
    failed = {"failure": "no key", "failure_kind": "raised", "reward": None, "outcome": "reward_failed"}
    write(directory, "step_1.jsonl", [sample(0, 0), sample(0, 1, reward=0.123456789), sample(3, 0, **failed)])
    write(directory, "validation_0.jsonl", [sample(0, 0, outcome=None)])
    (directory / "metrics.jsonl").write_text(
        '{"step": 0, "validation/accuracy": 0.25}\n'
        '{"step": 1, "train/loss": null, "train/reward": 0.1234567}\n'
        '{"step": 2, "train/rew'  # being written
    )
    return directory


def contents(page: Path, name: str) -> Any:
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page.read_text())
    assert found, name
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def of(run: Path, **limits: int) -> RunData:
    data = RunData(run, **limits)
    data.update()
    return data


def test_the_head_has_the_curves_and_a_row_for_each_sample(run: Path) -> None:
    head = of(run).head()
    assert head["name"] == "run"
    assert head["curves"] == {
        "steps": [0, 1],
        "values": {
            "train/loss": [None, None],
            "train/reward": [None, 0.123457],
            "validation/accuracy": [0.25, None],
        },
    }
    assert head["shards"] == [
        {"mode": "training", "step": 1, "dumped": 3, "shown": 3, "excerpt_of": None},
        {"mode": "validation", "step": 0, "dumped": 1, "shown": 1, "excerpt_of": None},
    ]
    # The validation's problem 0 has the name of training's: they are told apart by the mode of their shard.
    assert head["problems"] == [("pairs", 10, "sums", "0+1="), ("pairs", 13, "sums", "3+1=")]
    assert head["failures"] == [("raised", "no key")]
    assert head["rows"] == {
        "shard": [0, 0, 0, 1],
        "place": [0, 1, 2, 0],
        "group": [0, 0, 3, 0],
        "generation": [0, 1, 0, 0],
        "problem": [0, 0, 1, 0],
        "reward": [1.0, 0.12346, None, 1.0],
        "length": [3, 3, 3, 3],
        "outcome": ["trained", "trained", "reward_failed", None],
        "failure": [None, None, 0, None],
        "response": ["</script>", "</script>", "</script>", "</script>"],
        "components": [0, 0, 0, 0],
        "parts": [[1.0], [1.0], [1.0], [1.0]],
    }
    assert head["components"] == [("exact",)]
    assert head["left_out"] == []


def test_the_page_has_everything_in_one_file_whatever_the_texts_contain(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_report(page, [of(run)])
    assert contents(page, "head")["runs"][0]["shards"][1]["mode"] == "validation"
    assert contents(page, "shard-0-0")[0] == sample(0, 0)
    assert contents(page, "shard-0-1")[0]["outcome"] is None
    text = page.read_text()
    assert not re.search(r'(?:src|href)="(?!data:,)', text)
    assert "/*" not in text.split("</style>")[0]  # every part of the template was filled in


def test_the_page_explains_each_of_its_metrics_and_leads_to_the_page_on_all(run: Path) -> None:
    page = run / "report.html"
    write_report(page, [of(run)])
    head = contents(page, "head")
    assert list(head["meanings"]) == ["train/loss", "train/reward", "validation/accuracy"]
    assert head["meanings"]["train/reward"].startswith("mean raw reward of all samples of the step")
    assert (run / unquote(head["metrics_page"])).samefile(
        Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
    )


def test_dumps_of_before_there_were_tokens_sources_and_indices_are_read(run: Path) -> None:
    old = sample(0, 0)
    for name in ("source", "index", "outcome", "num_response_tokens"):
        del old[name]
    write(run, "step_1.jsonl", [old, {**old, "generation": 1, "failure": "died"}])
    head = of(run).head()
    assert head["problems"][0] == (None, None, "sums", "0+1=")
    assert head["failures"] == [("failed", "died")]


@pytest.mark.parametrize(
    ("max_samples", "kept"),
    [(100, [1, 2, 3, 4, 5, 6]), (50, [1, 3, 5, 6]), (30, [1, 5, 6]), (20, [1, 6]), (19, [6]), (1, [6])],
)
def test_what_is_too_much_is_left_out_evenly_between_the_first_and_the_latest_step(
    max_samples: int, kept: list[int]
) -> None:
    files = [SampleFile("training", step, Path(f"step_{step}.jsonl")) for step in range(1, 7)]
    chosen = chosen_files(files, samples=[10] * 6, sizes=[1] * 6, max_samples=max_samples)
    assert [file.step for file in chosen] == kept


def test_the_page_says_which_steps_and_samples_are_left_out(run: Path) -> None:
    for step in (2, 3):
        write(run, f"step_{step}.jsonl", [sample(0, 0), sample(1, 0), sample(1, 1)])
    head = of(run, max_samples=2).head()
    assert head["left_out"] == [["training", 1], ["training", 2]]
    # Of the latest step the first whole groups: sample 1 of group 1 would be one too many.
    assert head["shards"][0] == {
        "mode": "training",
        "step": 3,
        "dumped": 3,
        "shown": 1,
        "excerpt_of": None,
    }


def test_an_excerpt_says_of_how_many_samples_it_is(run: Path) -> None:
    write(run, "step_10.jsonl", [sample(0, 0, excerpt_of=1024), sample(0, 1, excerpt_of=1024)])
    assert [shard["excerpt_of"] for shard in of(run).head()["shards"]] == [None, 1024, None]


@pytest.mark.parametrize(
    ("turns", "shown"),
    [
        (["4", " no\n", "5"], "4 no 5"),
        (["a" * 120], "a" * 120),
        (["a" * 100 + "b" * 100], "a" * 60 + " … " + "b" * 60),
    ],
)
def test_a_table_has_the_beginning_and_the_end_of_a_response(run: Path, turns: list[str], shown: str) -> None:
    of_roles = [{"role": "assistant", "content": text} for text in turns]
    write(run, "step_1.jsonl", [sample(0, 0, turns=of_roles)])
    assert of(run).head()["rows"]["response"][0] == shown


def test_several_runs_share_the_room_of_one(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(run_page, "MAX_SAMPLES", 2)
    for step in (2, 3):
        write(run, f"step_{step}.jsonl", [sample(0, 0)])
    page = tmp_path / "sweep.html"
    write_comparison({run: "0 lr=1"}, page)
    assert contents(page, "head")["runs"][0]["left_out"] == [["training", 1], ["training", 2]]
    other = tmp_path / "other"
    other.mkdir()
    (other / "metrics.jsonl").write_text('{"step": 1, "train/reward": 1.0}\n')
    write_comparison({run: "0 lr=1", other: "1 lr=2"}, page)
    runs = contents(page, "head")["runs"]
    assert [each["name"] for each in runs] == ["0 lr=1", "1 lr=2"]
    assert [one["step"] for one in runs[0]["shards"]] == [3, 0]


def test_the_page_has_the_charts_library_and_its_licence(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_report(page, [of(run)])
    found = re.search(r'id="script-0">([^<]*)</script>', page.read_text())
    assert found
    assert b"Bokeh" in gzip.decompress(base64.b64decode(found[1]))
    licence = re.search(r"<!-- Bokeh draws the curves\.(.*?)-->", page.read_text(), re.DOTALL)
    assert licence
    for owner in ("Anaconda, Inc., and Bokeh Contributors", "jQuery Foundation", "numbro.js"):
        assert owner in licence[1]
    assert "THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS" in licence[1]


def test_a_file_is_read_again_only_when_it_changed(run: Path) -> None:
    data = of(run)
    before = data.shards
    path = write(run, "step_1.jsonl", [sample(7, 0)])
    os.utime(path, (1, 1))
    data.update()
    assert [row.group for row in data.shards[0].rows] == [7]
    assert data.shards[1] is before[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"group": 1\n', "step_1.jsonl:1: no JSON object"),
        ("[1]\n", r"step_1.jsonl:1: no JSON object \(it is a list or a plain value\)"),
        ('{"group": 1}\n', "the sample has no generation, env, prompt, turns, rewards; remove the line"),
    ],
)
def test_a_broken_line_is_named(run: Path, text: str, message: str) -> None:
    (run / "rollouts" / "step_1.jsonl").write_text(text)
    with pytest.raises(ReportProblem, match=message):
        of(run)


def test_files_of_other_names_are_left_alone(run: Path) -> None:
    write(run, "step_x.jsonl", [])
    assert [(file.mode, file.step) for file in sample_files(run)] == [("training", 1), ("validation", 0)]


def test_the_command_compares_runs_and_says_what_is_wrong(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    page = tmp_path / "both.html"
    assert main([str(run), str(run), "--output", str(page)]) == 0
    assert contents(page, "shard-1-1") == contents(page, "shard-0-1")
    assert main([str(tmp_path)]) == 2
    assert "is no run directory: it has neither metrics.jsonl nor rollouts" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(run), str(run)])
    assert "say where with --output" in capsys.readouterr().err


def test_a_run_writes_the_page_seldom_and_at_its_end(run: Path) -> None:
    now_s = [0.0]
    recorder = ReportRecorder(RunDirectory(run), clock=lambda: now_s[0])
    page = run / "report.html"

    def is_written(at_s: float) -> bool:
        page.unlink(missing_ok=True)
        now_s[0] = at_s
        recorder.log(1, {})
        return page.exists()

    assert [is_written(at_s) for at_s in (0.0, 19.0, 20.0, 30.0, 41.0)] == [True, False, True, False, True]
    page.unlink()
    recorder.close()
    assert page.exists()


DAMAGE = {
    "metrics.jsonl": [b"\xff\n", b'{"step": 1, "train/loss": "low"}\n', b'{"step": null}\n'],
    "rollouts/step_1.jsonl": [
        b"\xff\xfe\n",
        b"{}\n",
        *(
            json.dumps(sample(0, 0) | changes).encode() + b"\n"
            for changes in (
                {"rewards": [1.0]},
                {"rewards": {"exact": "high"}},
                {"turns": "none"},
                {"turns": [{"content": 5}]},
                {"prompt": None},
                {"reward": "high"},
                {"group": "first"},
                {"failure": 5},
            )
        ),
    ],
}


@pytest.mark.parametrize(("name", "line"), [(name, line) for name, lines in DAMAGE.items() for line in lines])
def test_a_damaged_file_is_refused_with_its_line_and_a_remedy(
    run: Path, name: str, line: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_bytes(line)
    assert main([str(run)]) == 2
    said = capsys.readouterr().err
    assert f"{run / name}:1: " in said
    assert "remove" in said
