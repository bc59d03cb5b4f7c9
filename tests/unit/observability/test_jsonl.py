from __future__ import annotations

import math

import pytest

from nemo_like.observability.jsonl import FollowedLines, MetricsFile, read_metrics, without_measurements


def test_one_line_per_step_with_sorted_keys(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(1, {"train/reward": 0.5, "train/loss": -0.25})
    metrics.write(2, {"train/reward": 1.0})
    metrics.close()
    assert path.read_text() == (
        '{"step": 1, "train/loss": -0.25, "train/reward": 0.5}\n{"step": 2, "train/reward": 1.0}\n'
    )


def test_training_and_validation_of_one_step_are_one_object(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(0, {"validation/accuracy": 0.25})
    metrics.write(1, {"train/reward": 0.5})
    metrics.write(1, {"validation/accuracy": 0.75})
    metrics.close()
    assert read_metrics(path) == [
        {"step": 0, "validation/accuracy": 0.25},
        {"step": 1, "train/reward": 0.5, "validation/accuracy": 0.75},
    ]


def test_a_step_is_on_disk_when_the_next_one_begins(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(1, {"train/reward": 0.5})
    assert read_metrics(path) == []
    metrics.write(2, {"train/reward": 0.6})
    assert read_metrics(path) == [{"step": 1, "train/reward": 0.5}]
    metrics.flush()
    assert len(read_metrics(path)) == 2
    metrics.close()


def test_closing_twice_writes_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(1, {"train/reward": 0.5})
    metrics.close()
    metrics.close()
    assert len(read_metrics(path)) == 1


def test_numbers_that_json_does_not_have_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.write(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "train/reward": 0.0})
    metrics.close()
    assert (
        path.read_text() == '{"step": 1, "train/grad_norm": null, "train/loss": null, "train/reward": 0.0}\n'
    )


def test_measurements_can_be_left_out_for_comparing_runs():
    record = {
        "step": 1,
        "train/reward": 0.5,
        "timing/train/generation": 0.2,
        "timing/validation/validation": 0.1,
        "performance/tokens_per_sec": 9000.0,
        "data_plane/put/bytes": 90.0,
        "data_plane/put/latency_p50_s": 0.01,
        "data_plane/put/gb_per_s": 0.4,
    }
    assert without_measurements(record) == {"step": 1, "train/reward": 0.5, "data_plane/put/bytes": 90.0}


def test_a_rewound_file_goes_on_after_the_last_step_that_is_kept(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    for step in range(4):
        metrics.write(step, {"train/reward": float(step)})
    metrics.rewind(last_step=1)
    assert [record["step"] for record in read_metrics(path)] == [0, 1]
    metrics.write(2, {"train/reward": 7.0})
    metrics.close()
    assert [record.get("train/reward") for record in read_metrics(path)] == [0.0, 1.0, 7.0]


def test_a_line_that_was_cut_short_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 3, "train/reward": 0.5}\n{"step": 4, "tr')
    MetricsFile(path).rewind(last_step=9)
    assert read_metrics(path) == [{"step": 3, "train/reward": 0.5}]


def test_who_follows_a_file_gets_each_line_once_and_only_whole_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    followed = FollowedLines(path)
    assert followed.new().values == []  # it is not there yet
    with path.open("a") as file:
        for text, expected in [
            ('{"step": 1}\n{"st', [{"step": 1}]),
            ("", []),
            ('ep": 2}\n', [{"step": 2}]),
            ('{"step": 3, "cut sho{"step": 4}\n[5]\n{"step": 6}\n', [{"step": 6}]),
        ]:
            file.write(text)
            file.flush()
            new = followed.new()
            assert (new.values, new.is_replaced) == (expected, False)


def test_who_follows_a_file_is_told_that_the_run_went_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics, followed = MetricsFile(path), FollowedLines(path)
    for step in range(4):
        metrics.write(step, {"train/reward": float(step)})
    metrics.flush()
    assert len(followed.new().values) == 4
    metrics.rewind(last_step=1)
    metrics.write(2, {"train/reward": 7.0})
    metrics.close()
    new = followed.new()
    assert [record["step"] for record in new.values] == [0, 1, 2]
    assert new.is_replaced
    assert not followed.new().is_replaced


BAD_LINES = [
    b"{",
    b"[1]",
    b'{"train/reward": 0.5}',
    b'{"step": "2"}',
    b'{"step": 2, "train/reward": "high"}',
    b"\xff\xfe",
    bytes(40),
    b"[" * 100_000,
    b"",
]


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_line_that_is_no_metrics_is_left_out_with_one_warning_that_names_it(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + bad + b'\n{"step": 3}\n')
    told = []
    assert read_metrics(path, told.append) == [{"step": 1}, {"step": 3}]
    assert told == [f"{path}:2 is no line of metrics; left out"]
    told.clear()
    metrics = MetricsFile(path)
    metrics.rewind(3, told.append)
    assert len(told) == 1
    metrics.write(4, {"train/reward": 0.5})
    metrics.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 3, 4]


def test_a_last_line_that_was_cut_short_is_left_out_without_a_word(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "tr')
    told = []
    assert read_metrics(path, told.append) == [{"step": 1}]
    assert told == []


def test_many_lines_that_are_no_metrics_make_one_warning(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'x\ny\n{"step": 1}\nz\n')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:1 is no line of metrics, and 2 more are none"):
        assert read_metrics(path) == [{"step": 1}]
