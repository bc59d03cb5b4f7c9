from __future__ import annotations

import pytest
import torch

from nemo_like.policy.backends.parking import HostMemory, HostParking


def test_tensors_have_memory_only_while_they_are_in_use() -> None:
    layer = torch.nn.Linear(3, 4)
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    parking = HostParking(layer.parameters())
    assert [parameter.untyped_storage().size() for parameter in layer.parameters()] == [0, 0]
    with parking.in_use():
        assert torch.equal(layer.weight, weight)
        assert torch.equal(layer.bias, bias)
    assert [parameter.untyped_storage().size() for parameter in layer.parameters()] == [0, 0]


def test_a_parked_layer_cannot_compute() -> None:
    layer = torch.nn.Linear(3, 4)
    parking = HostParking(layer.parameters())
    with pytest.raises(RuntimeError, match="storage of size 0"):
        layer(torch.ones(1, 3))
    with parking.in_use():
        layer(torch.ones(1, 3))


def test_what_is_written_while_in_use_lasts_and_shows_in_views_made_before() -> None:
    tensor = torch.zeros(4)
    view = tensor[1:3]
    parking = HostParking([tensor, view])
    for _ in range(2):
        with parking.in_use():
            view += 1
    with parking.in_use():
        assert tensor.tolist() == [0, 2, 2, 0]


def test_the_innermost_user_does_not_park_what_others_use() -> None:
    tensor = torch.ones(2)
    parking = HostParking([tensor])
    with parking.in_use():
        with parking.in_use():
            pass
        assert tensor.tolist() == [1, 1]


def test_a_phase_that_fails_leaves_its_tensors_parked() -> None:
    tensor = torch.ones(2)
    parking = HostParking([tensor])
    with pytest.raises(ValueError, match="broke off"), parking.in_use():
        raise ValueError("broke off")
    assert tensor.untyped_storage().size() == 0
    with parking.in_use():
        assert tensor.tolist() == [1, 1]


def test_every_offload_uses_the_same_memory_on_the_host() -> None:
    tensors = [torch.ones(3), torch.full((5,), 2.0)]
    parking = HostParking(tensors)
    places = [piece.data_ptr() for piece in parking._on_host.pieces]
    for _ in range(2):
        with parking.in_use():
            assert [tensor.tolist() for tensor in tensors] == [[1.0] * 3, [2.0] * 5]
    assert [piece.data_ptr() for piece in parking._on_host.pieces] == places


def test_tensors_that_are_parked_no_more_stay_on_their_device() -> None:
    tensor = torch.ones(2)
    HostParking([tensor]).end()
    assert tensor.tolist() == [1, 1]


def test_pieces_of_host_memory_have_their_sizes_and_can_be_seen_as_any_dtype() -> None:
    first, empty, last = HostMemory([3, 0, 16], is_pinned=False).pieces
    assert [len(piece) for piece in (first, empty, last)] == [3, 0, 16]
    first.fill_(1)
    last.view(torch.float64).fill_(0.0)
    assert first.tolist() == [1, 1, 1]
    assert last.data_ptr() - first.data_ptr() == 64
