"""Figures on the load of experts, worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.megatron import expert_load
from nemo_like.policy.megatron.expert_load import EXPERT_METRICS, ExpertLoad, load_metrics


def metrics(counts: list[list[float]], first_weights: list[float], num_chosen: int = 2) -> dict[str, float]:
    return load_metrics(
        torch.tensor(counts, dtype=torch.float64),
        torch.tensor(first_weights, dtype=torch.float64),
        num_chosen,
    )


def test_an_even_load_has_every_figure_at_its_best() -> None:
    assert metrics([[3, 3, 3, 3]], [6 * 0.5]) == pytest.approx(
        {
            "moe/max_load": 1.0,
            "moe/load_entropy": 1.0,
            "moe/idle_experts": 0.0,
            "moe/top_expert_weight": 0.5,
        }
    )


def test_figures_are_means_over_layers() -> None:
    # Ten tokens, two experts each. Layer 0: all on two experts of four. Layer 1: even.
    found = metrics([[10, 10, 0, 0], [5, 5, 5, 5]], [9.0, 6.0])
    assert found == pytest.approx(
        {
            "moe/max_load": (2.0 + 1.0) / 2,
            "moe/load_entropy": (0.5 + 1.0) / 2,  # log 2 / log 4
            "moe/idle_experts": (0.5 + 0.0) / 2,
            "moe/top_expert_weight": (0.9 + 0.6) / 2,
        }
    )
    assert tuple(found) == EXPERT_METRICS


def test_nothing_is_reported_of_no_tokens() -> None:
    assert metrics([[0, 0], [0, 0]], [0.0, 0.0]) == {}


class Router(torch.nn.Module):
    """Gives what it is called with; the hooks see no difference."""

    layer_number = 2  # the first layer has no experts
    config = SimpleNamespace(sequence_parallel=False)

    def forward(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        return weights, weights > 0


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router()

    def forward(self, weights: Tensor, *, labels: object) -> None:
        self.router(weights)


def mixture(num_layers: int, num_experts: int | None) -> ModelInfo:
    """One expert of each token; the first layer has none. Without experts it is dense."""
    sizes: dict[str, Any] = dict.fromkeys(ModelInfo.__slots__, 8) | {"model_type": "llama"}
    experts = {"num_experts": num_experts, "num_experts_per_token": 1, "num_dense_layers": 1}
    return ModelInfo(**{**sizes, **experts, "num_layers": num_layers})


CHOICES = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])


@pytest.mark.parametrize("recomputes", [False, True])
def test_each_scored_token_counts_once_also_where_layers_are_recomputed(
    monkeypatch: pytest.MonkeyPatch, recomputes: bool
) -> None:
    monkeypatch.setattr(expert_load, "TopKRouter", Router)
    monkeypatch.setattr(expert_load.dist, "all_reduce", lambda sums: None)
    model = Model()
    load = ExpertLoad([model], mixture(2, 2), torch.device("cpu"), recomputes=recomputes)
    inputs = SimpleNamespace(output_index=torch.tensor([0, 1, 1]))  # the last two tokens predict nothing
    model.eval()
    model(CHOICES, labels=inputs)  # scores only
    model.train()
    if recomputes:
        with torch.no_grad():
            model(CHOICES, labels=inputs)
    model(CHOICES, labels=inputs)
    found = {name: metric.value for name, metric in load.result(num_replicas=2).items()}
    assert found["moe/max_load"] == pytest.approx(2 / 3 * 2)
    assert found["moe/top_expert_weight"] == 1.0
    assert load.result(num_replicas=2) == {}


def test_a_dense_model_reports_nothing() -> None:
    load = ExpertLoad([torch.nn.Linear(2, 2)], mixture(2, None), torch.device("cpu"), recomputes=False)
    load.forget()
    assert load.result(num_replicas=1) == {}


def test_a_stage_without_experts_takes_part_in_the_sum_over_all_stages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def add_other_stage(sums: Tensor) -> None:
        sums += torch.tensor([[1.0, 3.0, 4.0]])

    monkeypatch.setattr(expert_load.dist, "all_reduce", add_other_stage)
    load = ExpertLoad([torch.nn.Linear(2, 2)], mixture(2, 2), torch.device("cpu"), recomputes=False)
    found = {name: metric.value for name, metric in load.result(num_replicas=1).items()}
    assert found["moe/max_load"] == pytest.approx(3 / 4 * 2)
