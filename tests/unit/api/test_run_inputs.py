"""What a program gives to a run is checked, and written for the run's processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from nemo_like.api.run_inputs import check_reward, checked_rows, named_reward, write_reward, write_rows
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import load_config
from nemo_like.data.options import DatasetConfig
from nemo_like.environments.own_reward import WeightedRewards, loaded_reward
from tests.unit.config.checkpoints import DEMO

ROWS = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "level": 3}]


@pytest.fixture(scope="module")
def source() -> DatasetConfig:
    return load_config(DEMO).data.train[0]


def test_rows_become_dicts_and_lack_no_answer(source: DatasetConfig) -> None:
    rows = checked_rows("train", iter(ROWS), source)
    assert rows == [{"answer": "2", "prompt": "1+1="}, {"answer": None, "prompt": "1+2=", "level": 3}]


def test_the_path_of_a_file_becomes_absolute(
    source: DatasetConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.parquet").touch()
    monkeypatch.chdir(tmp_path)
    assert checked_rows("train", "train.parquet", source) == tmp_path / "train.parquet"


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([], 'train has no rows; give at least one, such as {"prompt": "1+1="}'),
        ({"prompt": "1+1="}, "train is dict; give a list of dicts"),
        (3, "train is int; give a list of dicts"),
        (["1+1="], "train[0] is str and no dict"),
        (
            pd.DataFrame(ROWS),
            "train[0] is str and no dict; give a list of dicts; of a table of pandas: table.to_",
        ),
        (
            [*ROWS, {"question": "1+1="}],
            "train[2] has no 'prompt', or an empty one; it has 'question'; overrides=",
        ),
        ([{"prompt": ""}], "train[0] has no 'prompt', or an empty one"),
        (
            [{"prompt": "1", "size": np.int64(3)}],
            "train[0] has a field 'size' that JSON cannot hold: Object of",
        ),
        ([{"prompt": "1", "name": "\ud800"}], "train[0] has a field 'name' that JSON cannot hold: "),
        (
            [{"prompt": "1", "answer": ["2"]}],
            "train[0] cannot be used: field 'answer': the answer is ['2'] (list)",
        ),
        ("no/such.jsonl", "train=no/such.jsonl is not a file"),
        (str(DEMO), "must end in .json, .jsonl, .parquet, .csv, .arrow"),
    ],
)
def test_rows_that_no_run_could_use_are_refused(source: DatasetConfig, rows: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        checked_rows("train", rows, source)
    assert told in str(raised.value)


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        (
            lambda text: 1.0,
            "reward takes 'text', which is neither of a turn nor in train[0], which has no further",
        ),
        (lambda level: 1.0, "reward takes 'level', which is neither of a turn nor in train[0]"),
        (lambda completions, response: 1.0, "reward takes 'response', which is neither"),
        (0.5, "reward is float and cannot be called"),
    ],
)
def test_a_reward_that_takes_what_rows_lack_is_refused(source: DatasetConfig, reward: Any, told: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_reward(reward, "train", ROWS, source)
    assert told in str(raised.value)


def test_a_reward_may_take_fields_that_every_row_has_and_further_ones_with_defaults(
    source: DatasetConfig,
) -> None:
    check_reward(lambda response, level=0, **rest: 1.0, "train", ROWS, source)
    check_reward(lambda response, level: 1.0, "train", ROWS[1:], source)
    check_reward(lambda completions, prompts, level: [], "train", ROWS[1:], source)
    check_reward(lambda anything: 1.0, "train", Path("train.jsonl"), source)  # which is read later


def correct(response: str, answer: str) -> float:
    return float(response == answer)


def brief(completions: list[str], level: int = 0) -> list[float]:
    return [1.0 for _ in completions]


def test_a_list_of_rewards_is_named_by_its_functions_and_has_weights() -> None:
    assert named_reward(correct, None) is correct
    equal = named_reward([correct, brief], None)
    assert equal == WeightedRewards({"correct": correct, "brief": brief}, {"correct": 1.0, "brief": 1.0})
    given = named_reward((correct, brief), [2, np.float32(0.5)])
    assert isinstance(given, WeightedRewards)
    assert list(given.weights.items()) == [("correct", 2.0), ("brief", 0.5)]


@pytest.mark.parametrize(
    ("reward", "weights", "told"),
    [
        ([], None, "reward=[] has no function"),
        ([correct, "org/model"], None, "reward[1] is str and cannot be called; give a function"),
        ([correct, 3], None, "reward[1] is int and cannot be called"),
        ([correct, brief, correct], None, "reward[2] has the name 'correct' of another function of the list"),
        ([correct, brief], [1.0], "reward_weights=[1.0] must be a list of 2 numbers, one per function of"),
        ([correct], 2.0, "reward_weights=2.0 must be a list of 1 numbers"),
        ([correct, brief], [1.0, "2"], "reward_weights[1]='2' must be a finite number"),
        ([correct, brief], [float("inf"), 1.0], "reward_weights[0]=inf must be a finite number"),
        (correct, [1.0], "reward_weights are for a list of functions; give reward as a list"),
    ],
)
def test_rewards_and_weights_that_do_not_go_together_are_refused(
    reward: Any, weights: Any, told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        named_reward(reward, weights)
    assert told in str(raised.value)


def test_a_reward_of_a_list_that_takes_what_rows_lack_is_named(source: DatasetConfig) -> None:
    check_reward(named_reward([correct, brief], None), "train", ROWS, source)
    with pytest.raises(
        ConfigError, match=r"reward\[1\] takes 'level', which is neither of a turn nor in train"
    ):
        check_reward(named_reward([correct, lambda level: 1.0], None), "train", ROWS, source)


def test_files_are_named_by_what_is_in_them(tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    first, again = (write_rows(folder, "train", [*ROWS]) for _ in range(2))
    other = write_rows(folder, "train", ROWS[:1])
    assert first == again != other
    assert [json.loads(line) for line in first.read_text().splitlines()] == ROWS
    reward = loaded_reward(str(write_reward(folder, lambda response: 2 * len(response))))
    assert callable(reward)
    assert reward(response="ab") == 4
    assert sorted(path.name.partition("-")[0] for path in folder.iterdir()) == ["reward", "train", "train"]


def test_a_file_that_is_given_stays_where_it_is(tmp_path: Path) -> None:
    given = tmp_path / "train.jsonl"
    assert write_rows(tmp_path / "inputs", "train", given) == given
    assert not (tmp_path / "inputs").exists()
