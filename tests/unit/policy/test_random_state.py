from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_like.policy.workers.random_state import load_random_state, save_random_state

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
OWN = {"experts": torch.tensor([7, 9], dtype=torch.uint8)}


class FakeCuda:
    """The generators of two devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.states = [torch.tensor([number], dtype=torch.uint8) for number in range(2)]
        monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: self.states[device.index].clone())
        monkeypatch.setattr(torch.cuda, "set_rng_state", self.set)

    def set(self, state: torch.Tensor, device: torch.device) -> None:
        self.states[device.index] = state


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


def test_every_generator_draws_on_as_it_would_have(cuda: FakeCuda, tmp_path: Path) -> None:
    save_random_state(tmp_path / "state.pt", CUDA, OWN)
    expected = torch.rand(3)
    cuda.states = [torch.tensor([5], dtype=torch.uint8)] * 2
    own = load_random_state(tmp_path / "state.pt", CUDA)
    assert torch.rand(3).equal(expected)
    assert [int(state) for state in cuda.states] == [5, 1]  # the worker's device, and no other
    assert own.keys() == OWN.keys()
    assert own["experts"].equal(OWN["experts"])


@pytest.mark.parametrize(("saved_on", "loaded_on"), [(CUDA, CPU), (CPU, CUDA)])
def test_on_another_kind_of_device_the_cpu_alone_goes_on(
    saved_on: torch.device, loaded_on: torch.device, cuda: FakeCuda, tmp_path: Path
) -> None:
    save_random_state(tmp_path / "state.pt", saved_on, OWN)
    expected = torch.rand(3)
    cuda.states = []  # not touched
    assert load_random_state(tmp_path / "state.pt", loaded_on) == {}
    assert torch.rand(3).equal(expected)


def test_a_file_with_the_state_of_the_cpu_alone_is_read(cuda: FakeCuda, tmp_path: Path) -> None:
    torch.save(torch.get_rng_state(), tmp_path / "state.pt")
    expected = torch.rand(3)
    assert load_random_state(tmp_path / "state.pt", CUDA) == {}
    assert torch.rand(3).equal(expected)
