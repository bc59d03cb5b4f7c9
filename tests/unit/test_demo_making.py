from __future__ import annotations

from pathlib import Path

import pytest

from scripts.demo_model.making import whole_directory


def test_a_directory_that_another_process_made_meanwhile_stays(tmp_path: Path) -> None:
    output = tmp_path / "model"
    with whole_directory(output) as aside:
        (aside / "model.safetensors").write_text("late")
        with whole_directory(output) as other:
            (other / "model.safetensors").write_text("first")
    assert (output / "model.safetensors").read_text() == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_the_block_raises_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), whole_directory(tmp_path / "model"):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
