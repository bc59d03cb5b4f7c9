from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.show_rollouts import format_group, main, most_telling
from tests.unit.config.checkpoints import REPOSITORY


def sample(generation: int, reward: float | None, failure: str | None = None) -> dict[str, Any]:
    return {
        "generation": generation,
        "env": "sums",
        "prompt": "21+43=",
        "answer": "640",
        "turns": [{"role": "assistant", "content": "640"}],
        "rewards": {"exact_match": 1.0},
        "reward": reward,
        "scaled_reward": reward,
        "shaped_reward": reward,
        "advantage": reward,
        "is_truncated": False,
        "outcome": "trained" if failure is None else "reward_failed",
        "failure": failure,
    }


def test_a_failed_reward_is_shown_as_failed_beside_the_best_and_the_worst_answer() -> None:
    group = [sample(0, 0.0), sample(1, None, "it raised"), sample(2, 1.0), sample(3, None, "it hung")]
    lines = list(format_group(4, group, most_telling(group)))
    assert lines == [
        "== group 4 (sums): 4 answers, rewards 1 0, 2 failed",
        "21+43=",
        "-- expected: 640",
        "-- answer 2: reward 1, advantage +1.000, trained",
        "640",
        "-- answer 0: reward 0, advantage +0.000, trained",
        "640",
        "-- answer 1: reward failed: it raised",
        "640",
        "",
    ]


def test_a_group_that_nobody_could_judge_has_no_best_answer() -> None:
    group = [sample(0, None, "it raised"), sample(1, None, "it raised")]
    lines = list(format_group(0, group, most_telling(group)))
    assert lines[0] == "== group 0 (sums): 2 answers, rewards none, 2 failed"
    assert [line for line in lines if line.startswith("-- answer")] == [
        "-- answer 0: reward failed: it raised"
    ]


def test_a_prompt_says_where_its_images_are() -> None:
    (line,) = [{**sample(0, 1.0), "images": ["/data/a.png"]}]
    assert list(format_group(0, [line], [line]))[1:4] == [
        "21+43=",
        "-- image: /data/a.png",
        "-- expected: 640",
    ]


def write_steps(run_dir: Path, *steps: int) -> None:
    (run_dir / "rollouts").mkdir(parents=True)
    for step in steps:
        line = json.dumps({**sample(0, 1.0), "group": step})
        (run_dir / "rollouts" / f"step_{step}.jsonl").write_text(f"{line}\n")


def test_the_latest_step_is_shown_unless_another_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_steps(tmp_path / "run", 2, 10, 9)
    assert main([str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out.startswith("== group 10 (sums)")
    assert main([str(tmp_path / "run"), "--step", "9"]) == 0
    assert capsys.readouterr().out.startswith("== group 9 (sums)")


def test_an_excerpt_is_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path, 10)
    path = tmp_path / "rollouts" / "step_10.jsonl"
    line = {**json.loads(path.read_text()), "excerpt_of": 1024}
    path.write_text(json.dumps(line) + "\n")
    assert main([str(tmp_path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "an excerpt: 1 of the step's 1,024 samples; rollout.dump_period=1 keeps all of every step"
    )
    assert said[2].startswith("== group 10 (sums)")


def test_a_reader_that_has_seen_enough_ends_it_without_an_error(tmp_path: Path) -> None:
    long = {**sample(0, 1.0), "prompt": "1+" * 500_000, "group": 0}  # more than a pipe holds
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step_1.jsonl").write_text(json.dumps(long) + "\n")
    command = [sys.executable, str(REPOSITORY / "scripts" / "show_rollouts.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as shown:
        assert shown.stdout is not None and shown.stderr is not None
        assert shown.stdout.read(8) == "== group"
        shown.stdout.close()
        assert shown.stderr.read() == ""
        assert shown.wait(timeout=60) == -signal.SIGPIPE


def test_what_is_not_there_is_told_by_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_steps(tmp_path / "run", 2, 10)
    write_steps(tmp_path / "without")
    for arguments, told in (
        (["run", "--step", "3"], "step_3.jsonl does not exist; there are steps 2, 10"),
        (["without"], "without has no samples of training steps; rollout.dump_period=1 keeps those"),
        (["nowhere", "--step", "3"], "nowhere is not a directory"),
    ):
        assert main([str(tmp_path / arguments[0]), *arguments[1:]]) == 2
        assert told in capsys.readouterr().err


def test_the_answers_of_one_outcome_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rollouts").mkdir()
    texts = ["a\u2028b", "c", "d"]  # a line separator, at which only str.splitlines ends a line
    samples = [sample(0, 1.0), sample(1, None, "it hung"), sample(0, 1.0)]
    lines = [
        json.dumps(
            {**one, "group": group, "turns": [{"role": "assistant", "content": text}]}, ensure_ascii=False
        )
        for one, group, text in zip(samples, (3, 3, 4), texts, strict=True)
    ]
    (tmp_path / "rollouts" / "step_1.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert main([str(tmp_path), "--outcome", "reward_failed"]) == 0
    shown = capsys.readouterr().out
    assert "== group 3" in shown and "== group 4" not in shown
    assert "-- answer 1: reward failed: it hung\nc\n" in shown and "a\u2028b" not in shown
    assert main([str(tmp_path), "--outcome", "overlong"]) == 2
    assert capsys.readouterr().err == "no answer has the outcome overlong\n"


def test_what_a_model_wrote_does_nothing_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first answer writes a terminal's clipboard, the second has half of a surrogate pair."""
    answers = [
        {**sample(number, reward), "group": 0, "turns": [{"role": "assistant", "content": said}]}
        for number, (reward, said) in enumerate([(1.0, "\x1b]52;c;cHduZWQ=\x07"), (0.0, "\udc80")])
    ]
    folder = tmp_path / "rollouts"
    folder.mkdir()
    (folder / "step_1.jsonl").write_text("".join(f"{json.dumps(answer)}\n" for answer in answers))
    assert main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\\x1b]52;c;cHduZWQ=\\x07\n" in shown
    assert "\\udc80\n" in shown


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"\xff",
        b"[1]",
        b"{}",
        *(
            json.dumps({"group": 0, **sample(0, 1.0), **changed}).encode()
            for changed in ({"reward": "high"}, {"turns": [1]}, {"failure": 5}, {"outcome": None})
        ),
        json.dumps({name: one for name, one in sample(0, 1.0).items() if name != "answer"}).encode(),
    ],
)
def test_a_damaged_line_is_refused_with_its_number_and_a_remedy(
    tmp_path: Path, line: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rollouts" / "step_1.jsonl"
    path.parent.mkdir()
    path.write_bytes(json.dumps({"group": 0, **sample(0, 1.0)}).encode() + b"\n" + line + b"\n")
    assert main([str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}:2: " in said
    assert "remove the line, or the file" in said
