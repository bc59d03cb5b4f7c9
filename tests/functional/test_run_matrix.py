"""Whole runs of three steps, over every layout, backend and kind of sample, against plain runs.

``MATRIX_TABLE=1 pytest tests/functional/test_run_matrix.py`` writes what it measured into
docs/reference/layout_runs.md.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from nemo_like.configuration import load_config
from scripts.demo_model.shapes import SIDE, write_records
from tests.functional.image_models import make_checkpoint
from tests.functional.matrix_of_runs import (
    GROUPS,
    IN_MEMORY,
    NUM_STEPS,
    TOLERANCE,
    Group,
    Spread,
    deviation,
    short_run,
    weights,
)
from tests.functional.matrix_table import write_row
from tests.functional.runs import ROOT, FinishedRun

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_run]


@pytest.fixture(scope="module")
def image_task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A random model that reads pictures, and pictures."""
    path = tmp_path_factory.mktemp("task")
    make_checkpoint(path / "model", "qwen2_5_vl")
    for name in ("train", "validation"):
        write_records(path / "shapes", name, 64, 5, SIDE)
    return [f"policy.model_name={path / 'model'}", f"vars.shapes={path / 'shapes'}"]


class PlainRuns:
    """The plain run of each group, made on first use."""

    def __init__(self, directory: Path, request: pytest.FixtureRequest) -> None:
        self._directory, self._request = directory, request
        self._runs: dict[str, FinishedRun] = {}

    def arguments(self, group: Group) -> list[str]:
        made = self._request.getfixturevalue(group.fixture)
        return made if isinstance(made, list) else []

    def of(self, group: Group) -> FinishedRun:
        if group.name not in self._runs:
            self._directory.mkdir(exist_ok=True)
            arguments = [*self.arguments(group), "rollout.record=true", *IN_MEMORY]
            self._runs[group.name] = short_run(self._directory, group, arguments)
        return self._runs[group.name]


@pytest.fixture(scope="module")
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlainRuns:
    return PlainRuns(tmp_path_factory.mktemp("plain"), request)


def marked(group: Group, *values: object, is_quick: bool, name: str) -> object:
    return pytest.param(group, *values, id=name, marks=[] if is_quick else pytest.mark.slow)


@pytest.mark.parametrize(
    "group", [marked(group, is_quick=group.is_quick, name=group.name) for group in GROUPS]
)
def test_a_plain_run_learns_from_every_step(group: Group, plain: PlainRuns) -> None:
    run = plain.of(group)
    assert min(run.metrics("train/grad_norm")) > 0.01
    assert len(run.metrics("train/token_mult_prob_error")) == NUM_STEPS
    assert max(run.metrics("train/token_mult_prob_error")) < 1.00002
    model = load_config(run.run_dir / "config.yaml").policy.model_name
    start, end = weights(ROOT / model), weights(run.run_dir / "final_hf")
    moved = [float((end[name] - tensor).norm() / tensor.norm()) for name, tensor in start.items()]
    assert max(moved) > 50 * TOLERANCE  # else agreement of the weights would mean little


@pytest.mark.parametrize(
    ("group", "spread"),
    [
        marked(group, spread, is_quick=spread.is_quick, name=f"{group.name}: {spread.name}")
        for group in GROUPS
        for spread in group.spreads
    ],
)
def test_how_a_run_is_spread_changes_no_result(
    group: Group, spread: Spread, plain: PlainRuns, tmp_path: Path
) -> None:
    expected = plain.of(group)
    source = [] if spread.samples else [f"rollout.replay={expected.run_dir / 'recorded'}"]
    run = short_run(tmp_path, group, [*plain.arguments(group), *spread.arguments, *source])
    found = deviation(run, expected)
    if os.environ.get("MATRIX_TABLE"):
        write_row(ROOT / "docs" / "reference" / "layout_runs.md", group, spread, found)
    assert max(found.loss, found.grad_norm, found.weights) < TOLERANCE, found
    for key in ("train/reward", "train/total_num_tokens", "train/global_valid_toks"):
        assert run.metrics(key) == pytest.approx(expected.metrics(key), rel=1e-12)
    assert max(run.metrics("train/token_mult_prob_error")) < 1.00002
    for key in ("train/moe/max_load", "train/moe/load_entropy"):
        if "backend=fsdp" not in " ".join(spread.arguments):
            assert run.metrics(key) == pytest.approx(expected.metrics(key), rel=1e-3)
