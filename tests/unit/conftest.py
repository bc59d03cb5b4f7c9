"""The demo's configuration, pointed at a checkpoint that is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.config.loader import load_config, to_yaml
from nemo_like.config.schema import Config
from tests.unit.config.checkpoints import DEMO, write_checkpoint


@pytest.fixture(scope="session")
def resolved_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo in one file, which loads faster than its dozen of defaults."""
    path = tmp_path_factory.mktemp("configs") / "demo.yaml"
    path.write_text(to_yaml(load_config(DEMO)))
    return path


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def demo(resolved_demo: Path, checkpoint: Path, tmp_path: Path) -> Callable[..., Config]:
    """``demo("grpo.seed=2")``: the demo's configuration with arguments, on a checkpoint that is there."""

    def load(*overrides: str) -> Config:
        there = [f"policy.model_name={checkpoint}", f"logger.log_dir={tmp_path / 'runs'}"]
        return load_config(resolved_demo, [*there, *overrides])

    return load
