"""The demo's configuration, pointed at a checkpoint that is there."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest

from nemo_like.config.loader import to_yaml
from nemo_like.configuration import Config, load_config
from tests.unit.config.checkpoints import DEMO, write_checkpoint
from tests.unit.forked_checks import ForkedCall


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """Variables that a test sets in this process are not there for the next: storage and engines set some
    where they start, which is a process of their own in a run."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_checks() -> Iterator[None]:
    """Have children of slow checks be forks, which have at once what they would import."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("checks", "epochs"):
            patch.setattr(f"nemo_like.preflight.{module}.ChildCall", ForkedCall)
        yield


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
