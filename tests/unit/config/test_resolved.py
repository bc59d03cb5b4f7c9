from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.config.resolved import read_resolved


def test_what_a_run_left_to_the_environment_is_read_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("policy:\n  model_name: ${oc.env:MODEL}\nlogger:\n  token: ${oc.env:NOT_SET_ANYWHERE}\n")
    monkeypatch.setenv("MODEL", "/models/small")
    config = read_resolved(path, "policy")
    assert config["policy"] == {"model_name": "/models/small"}
    assert config["logger"] == {"token": "${oc.env:NOT_SET_ANYWHERE}"}
    monkeypatch.delenv("MODEL")
    with pytest.raises(ValueError, match=r"config\.yaml asks for what is not set: .*MODEL"):
        read_resolved(path, "policy")


def test_sections_refer_to_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "checkpointing:\n  checkpoint_dir: ${oc.env:SCRATCH}/${logger.run_name}\nlogger:\n  run_name: first\n"
    )
    monkeypatch.setenv("SCRATCH", "/scratch")
    assert read_resolved(path, "checkpointing")["checkpointing"] == {"checkpoint_dir": "/scratch/first"}
