"""AdamW's update a second time, against torch's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_like.tripwires.reference_updates import Sampled, UpdateSettings, adamw_excess

SETTINGS = UpdateSettings(
    rates=torch.full((4,), 0.01, dtype=torch.float64),
    decays=torch.full((4,), 0.1, dtype=torch.float64),
    num_updates=torch.full((4,), 2.0, dtype=torch.float64),
    beta1=0.9,
    beta2=0.99,
    eps=1e-8,
    roundoff=2.0**-24,
)


def sampled(weight: torch.Tensor, state: dict[str, Any]) -> Sampled:
    names = ("exp_avg", "exp_avg_sq")
    return Sampled(weight.detach().double().clone(), {name: state[name].double().clone() for name in names})


def second_update(**options: Any) -> tuple[Sampled, Sampled]:
    """The second of two updates by torch's AdamW, before and after; the last weight has no gradient."""
    weight = torch.nn.Parameter(torch.tensor([1.0, -0.02, 30.0, 0.5]))
    given = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, **options}
    adam = torch.optim.AdamW([weight], **given)
    found = []
    for gradient in ([0.3, -1e-5, 2.0, 0.0], [-0.1, 3e-5, 1.0, 0.0]):
        weight.grad = torch.tensor(gradient)
        if adam.state[weight]:
            found.append(sampled(weight, adam.state[weight]))
        adam.step()
    return found[0], sampled(weight, adam.state[weight])


def test_torchs_update_is_within_rounding() -> None:
    assert float(adamw_excess(*second_update(), SETTINGS).max()) < 1


@pytest.mark.parametrize(
    "options",
    [{"lr": 0.0101}, {"betas": (0.99, 0.9)}, {"betas": (0.9, 0.999)}, {"eps": 1e-4}, {"weight_decay": 0.0}],
)
def test_other_settings_are_beyond_it(options: dict[str, Any]) -> None:
    assert float(adamw_excess(*second_update(**options), SETTINGS).max()) > 10


def test_a_weight_that_does_not_move_though_its_moments_do_is_beyond_it() -> None:
    before, after = second_update()
    held = replace(after, weights=before.weights)
    assert (adamw_excess(before, held, SETTINGS) > 10).all()  # the last should have decayed


def test_a_weight_that_is_no_number_is_beyond_it() -> None:
    before, after = second_update()
    assert float(adamw_excess(before, replace(after, weights=after.weights * torch.nan), SETTINGS).max()) > 10
