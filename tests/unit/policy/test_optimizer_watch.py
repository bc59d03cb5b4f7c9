"""What one rank notices of its optimizer's settings, updates and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.configuration import load_config
from nemo_like.policy.loss.updated_tensors import UpdatedTensor
from nemo_like.policy.workers.optimizer_watch import OptimizerWatch
from nemo_like.tripwires.measured import Measured

ROOT = Path(__file__).resolve().parents[3]
POLICY = load_config(ROOT / "configs/grpo_arithmetic_cpu.yaml", ("policy.optimizer.weight_decay=0.1",)).policy

CRITIC = load_config(ROOT / "configs/ppo_arithmetic_cpu.yaml").value
assert CRITIC is not None


class Model:
    """A matrix and a vector, trained by torch's AdamW as configured, but for ``options`` of both groups."""

    def __init__(self, **options: Any) -> None:
        generator = torch.Generator().manual_seed(0)
        self.matrix = torch.nn.Parameter(torch.randn(20, 9, generator=generator))
        self.vector = torch.nn.Parameter(torch.ones(5))
        self.adam = torch.optim.AdamW(
            [
                {"params": [self.matrix], "weight_decay": 0.1},
                {"params": [self.vector], "weight_decay": 0.0},
            ],
            **{"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, **options},
        )
        self.watch = OptimizerWatch(POLICY)

    def tensors(self) -> list[UpdatedTensor]:
        return [
            UpdatedTensor(
                name=name,
                weight=parameter.detach(),
                is_matrix=parameter.dim() > 1,
                group=group,
                state=self.adam.state.get(parameter, {}),
            )
            for name, parameter, group in zip(
                ("matrix", "vector"), (self.matrix, self.vector), self.adam.param_groups, strict=True
            )
        ]

    def update(self, matrix: float = 1.0, vector: float = 1.0) -> dict[Measured, float]:
        """Make an update with random gradients times these numbers."""
        self.watch.before_update(self.tensors())
        self.matrix.grad = matrix * torch.randn(20, 9)
        self.vector.grad = vector * torch.randn(5)
        self.adam.step()
        return self.watch.after_update(self.tensors())


def test_right_updates_are_within_rounding_from_the_first_on() -> None:
    model = Model()
    for _ in range(3):
        assert model.update()[Measured.update_excess] < 1
    assert model.watch.named == []


def test_a_vector_that_decays_is_named() -> None:
    model = Model()
    model.adam.param_groups[1]["weight_decay"] = 0.1
    found = model.update()
    assert found[Measured.update_excess] > 1
    assert found[Measured.num_wrong_updates] == 1
    assert model.watch.named == ["vector (update)"]


def test_the_farthest_setting_of_all_groups_is_measured() -> None:
    model = Model()
    assert set(model.watch.settings(model.tensors()).values()) == {0.0}
    model.adam.param_groups[1].update(betas=(0.99, 0.9), eps=0.5, weight_decay=0.04)
    found = model.watch.settings(model.tensors())
    assert found[Measured.betas_gap] == pytest.approx(0.09)
    assert found[Measured.eps_gap] == pytest.approx(0.5)
    assert found[Measured.weight_decay_gap] == pytest.approx(0.04)


def test_a_tensor_without_gradients_is_still_from_the_second_update_on() -> None:
    model = Model()
    model.update(vector=0.0)
    assert model.watch.still(model.tensors()) == {}
    model.update(vector=0.0)
    assert model.watch.still(model.tensors()) == {Measured.num_still_tensors: 1.0}
    assert model.watch.named == ["vector (no gradient)"]


@pytest.mark.parametrize("num_before", [0, 1, 20])
@pytest.mark.parametrize("num_after", [0, 1, 20])
def test_an_update_without_any_gradient_says_nothing_of_a_tensor(num_before: int, num_after: int) -> None:
    """An adapter's first factor has no gradient in the first update that brings one."""
    model = Model()
    for is_moving in (*(0.0,) * num_before, 1.0, *(0.0,) * num_after):
        model.update(matrix=is_moving, vector=0.0)
        assert model.watch.still(model.tensors()) == {}
    model.update(vector=0.0)
    assert model.watch.still(model.tensors()) == {Measured.num_still_tensors: 1.0}


def test_experts_and_embeddings_may_be_still_and_so_may_all() -> None:
    model = Model()
    for _ in range(2):
        model.update(vector=0.0)
    matrix, vector = model.tensors()
    rare = replace(vector, name="layers.0.mlp.experts.weight1")
    assert model.watch.still([matrix, rare]) == {Measured.num_still_tensors: 0.0}
    assert model.watch.still([vector]) == {}


def test_an_output_layer_may_be_still_but_not_a_critics() -> None:
    model = Model()
    for _ in range(2):
        model.update(vector=0.0)
    matrix, vector = model.tensors()
    both = [matrix, replace(vector, name="output_layer.weight")]
    assert model.watch.still(both) == {Measured.num_still_tensors: 0.0}
    assert OptimizerWatch(CRITIC).still(both) == {Measured.num_still_tensors: 1.0}


def test_what_another_optimizer_updates_is_not_judged() -> None:
    model = Model()
    model.watch.before_update(model.tensors())
    with torch.no_grad():
        model.matrix.add_(1.0)
    other = [replace(one, state={"momentum_buffer": one.weight}) for one in model.tensors()]
    assert model.watch.after_update(other)[Measured.update_excess] == 0.0
