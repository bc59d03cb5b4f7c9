from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_like.config.remembered import noted, remembered
from nemo_like.config.resolvers import register_resolvers


def counted(look: Callable[[], object]) -> Callable[[], int]:
    """A computation that calls ``look``; its result is how often it was made."""
    times: list[None] = []

    def compute() -> int:
        look()
        times.append(None)
        return len(times)

    return compute


def test_a_result_is_kept_until_a_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    compute = counted(lambda: noted(file).is_file())

    def result() -> int:
        return remembered(tmp_path, compute)

    assert [result(), result()] == [1, 1]
    file.write_text("a: 1")
    assert [result(), result()] == [2, 2]
    file.write_text("a: 1\nb: 1")
    assert [result(), result()] == [3, 3]
    os.utime(file, ns=(1, 1))
    assert [result(), result()] == [4, 4]
    file.unlink()
    assert [result(), result()] == [5, 5]


def test_a_folder_changes_with_its_files(tmp_path: Path) -> None:
    compute = counted(lambda: list(noted(tmp_path).iterdir()))
    assert remembered(tmp_path, compute) == remembered(tmp_path, compute) == 1
    os.utime(tmp_path, ns=(1, 1))  # so that the change below is another time of the clock
    remembered(tmp_path, compute)
    (tmp_path / "a.yaml").touch()
    assert remembered(tmp_path, compute) == 3


def test_results_of_other_keys_are_others(tmp_path: Path) -> None:
    assert remembered((tmp_path, 1), lambda: 1) == 1
    assert remembered((tmp_path, 2), lambda: 2) == 2


def test_what_depends_on_the_environment_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register_resolvers()

    def compute() -> str:
        return str(OmegaConf.create({"a": "${oc.env:NEMO_LIKE_CHOICE}"}).a)

    for value in ("one", "two"):
        monkeypatch.setenv("NEMO_LIKE_CHOICE", value)
        assert remembered(tmp_path, compute) == value


def test_an_error_is_not_kept(tmp_path: Path) -> None:
    def fail() -> int:
        raise ValueError("no file")

    with pytest.raises(ValueError, match="no file"):
        remembered(tmp_path, fail)
    assert remembered(tmp_path, lambda: 1) == 1
