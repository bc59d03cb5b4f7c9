from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.driver.final_export import FinalExport, PolicyExport
from nemo_like.observability.run_directory import RunDirectory


def writes(text: str, path: str) -> None:
    (Path(path) / "model.safetensors").write_text(text)


@pytest.fixture
def export(tmp_path: Path) -> FinalExport:
    return FinalExport(RunDirectory(tmp_path), 10, PolicyExport())


def test_an_export_says_of_which_step_it_is(export: FinalExport) -> None:
    assert export.step is None
    export.write(lambda path: writes("first", path), step=4)
    assert export.step == 4
    export.write(lambda path: writes("second", path), step=8)
    assert export.step == 8
    assert (export.path / "model.safetensors").read_text() == "second"


def test_an_export_that_breaks_off_leaves_the_one_before(export: FinalExport) -> None:
    export.write(lambda path: writes("first", path), step=4)

    def breaks_off(path: str) -> None:
        writes("half", path)
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        export.write(breaks_off, step=8)
    assert export.step == 4
    assert (export.path / "model.safetensors").read_text() == "first"
    export.write(lambda path: writes("second", path), step=8)
    assert sorted(path.name for path in export.path.parent.iterdir()) == ["final_hf"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"step": null}'])
def test_an_export_that_does_not_say_its_step_counts_as_none(text: str, export: FinalExport) -> None:
    export.path.mkdir()
    (export.path / "run.json").write_text(text)
    assert export.step is None
