"""A reward model on a GPU gives the scores that it gives on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional.reward_models import decoder
from tests.unit.environments.asking import ask, turn


@pytest.mark.gpu
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_scores_are_those_of_the_cpu(precision: str, tolerance: float, tmp_path: Path) -> None:
    directory = decoder(tmp_path / "model")
    turns = [turn("46", prompt="12+34="), turn("x" * 60, prompt="q"), turn("no", prompt="a")]
    on_cpu, on_gpu = (
        [
            one.rewards["score"]
            for one in ask(
                "reward_model", *turns, model_name=str(directory), device=device, precision=precision
            )
        ]
        for device in ("cpu", "cuda")
    )
    assert on_gpu == pytest.approx(on_cpu, abs=tolerance)
