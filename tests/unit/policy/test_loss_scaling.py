"""The scale of float16: an overflow halves it, a while without doubles it, and checkpoints keep it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer.grad_scaler import DynamicGradScaler

from nemo_like.compat.cpu_shim import cuda_means_cpu
from nemo_like.policy.backends.loss_scaling import LossScaler, loss_scaler
from nemo_like.policy.options import LossScalingConfig, Precision
from tests.unit.policy.test_updating_backend import CRITIC

CPU = torch.device("cpu")
CONFIG = LossScalingConfig(
    initial_loss_scale=16.0, loss_scale_window=3, min_loss_scale=2.0, hysteresis=1, max_skipped_updates=5
)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def scales(cfg: LossScalingConfig, updates: str) -> list[float]:
    """The scale after each update; "o" is one whose gradients overflow."""
    scaler, found = LossScaler(cfg), []
    for update in updates:
        scaler.move(is_finite=update != "o")
        found.append(scaler.scale)
    return found


def test_an_overflow_halves_the_scale_down_to_the_least_one() -> None:
    assert scales(CONFIG, "o.ooo") == [8.0, 8.0, 4.0, 2.0, 2.0]


def test_a_window_without_an_overflow_doubles_the_scale() -> None:
    assert scales(CONFIG, "......") == [16.0, 16.0, 32.0, 32.0, 32.0, 64.0]
    assert scales(CONFIG, "..o...") == [16.0, 16.0, 8.0, 8.0, 8.0, 16.0]


def test_hysteresis_spares_the_first_overflows_until_the_scale_is_doubled() -> None:
    assert scales(replace(CONFIG, hysteresis=2), "o.o...o") == [16.0, 16.0, 8.0, 8.0, 8.0, 16.0, 16.0]


@pytest.mark.parametrize("hysteresis", [1, 3])
def test_it_moves_as_that_of_megatron_core(hysteresis: int) -> None:
    cfg, draw = replace(CONFIG, hysteresis=hysteresis), random.Random(hysteresis)
    updates = "".join(draw.choices(".o", [4, 1], k=200))
    with cuda_means_cpu():
        theirs = DynamicGradScaler(
            initial_scale=16.0,
            min_scale=2.0,
            growth_factor=2.0,
            backoff_factor=0.5,
            growth_interval=3,
            hysteresis=hysteresis,
        )
    expected = []
    for update in updates:
        theirs.update(update == "o")
        expected.append(float(theirs.scale))
    assert scales(cfg, updates) == expected


def test_skipped_updates_are_counted_while_they_follow_one_another() -> None:
    scaler, found = LossScaler(CONFIG), []
    for update in ".oo.o":
        scaler.move(is_finite=update != "o")
        found.append(scaler.skipped_in_a_row)
    assert found == [0, 1, 2, 0, 1]


def test_a_restored_scaler_moves_on_as_the_saved_one() -> None:
    saved, restored = LossScaler(CONFIG), LossScaler(replace(CONFIG, initial_loss_scale=1024.0))
    for update in "..o..":
        saved.move(is_finite=update != "o")
    restored.restore(saved.state())
    for update in ".o...":
        for scaler in (saved, restored):
            scaler.move(is_finite=update != "o")
        assert restored.state() == saved.state()


def test_a_checkpoint_of_another_precision_leaves_the_scaler_as_it_was() -> None:
    scaler = LossScaler(CONFIG)
    scaler.restore({"num_updates": 7})
    assert scaler.state() == LossScaler(CONFIG).state()


def test_gradients_are_divided_by_the_scale_in_place(alone: None) -> None:
    scaler, gradients = LossScaler(CONFIG), [torch.tensor([32.0, -8.0]), torch.tensor(16.0)]
    assert scaler.unscale(gradients, CPU)
    assert [gradient.tolist() for gradient in gradients] == [[2.0, -0.5], 1.0]
    assert scaler.unscale([], CPU)  # a rank may have no gradient


@pytest.mark.parametrize("odd", [torch.inf, -torch.inf, torch.nan])
def test_a_gradient_that_is_not_finite_is_found_and_halves_the_scale(odd: float, alone: None) -> None:
    scaler = LossScaler(CONFIG)
    assert not scaler.unscale([torch.ones(2), torch.tensor([1.0, odd])], CPU)
    assert (scaler.scale, scaler.skipped_in_a_row) == (8.0, 1)


def test_float16_alone_has_a_scaler() -> None:
    assert [loss_scaler(replace(CRITIC, precision=one)) is not None for one in Precision] == [
        one is Precision.float16 for one in Precision
    ]
