from __future__ import annotations

import pytest
import torch

from nemo_like.policy.backends.kept_weights import KeptWeights
from nemo_like.policy.options import ReferencePlacement


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.nn.Parameter(torch.tensor([3.0]))]


def values(tensors: list[torch.nn.Parameter]) -> list[list[float]]:
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("placement", ReferencePlacement)
def test_the_reference_is_what_the_weights_were_and_leaves_them_as_they_are(
    placement: ReferencePlacement,
) -> None:
    model = parameters()
    reference = KeptWeights(lambda: model, placement)
    for round_number in (10.0, 20.0):
        with torch.no_grad():
            model[0].fill_(round_number)
        with reference.in_model():
            assert values(model) == [[1.0, 2.0], [3.0]]
        assert values(model) == [[round_number, round_number], [3.0]]


@pytest.mark.parametrize("placement", ReferencePlacement)
def test_the_policys_weights_come_back_when_scoring_fails(placement: ReferencePlacement) -> None:
    model = parameters()
    reference = KeptWeights(lambda: model, placement)
    with torch.no_grad():
        model[1].fill_(7.0)
    with pytest.raises(RuntimeError, match="out of memory"), reference.in_model():
        raise RuntimeError("out of memory")
    assert values(model) == [[1.0, 2.0], [7.0]]
    with reference.in_model():
        assert values(model) == [[1.0, 2.0], [3.0]]


def test_a_swapped_reference_holds_one_model_on_the_host() -> None:
    model = parameters()
    reference = KeptWeights(lambda: model, ReferencePlacement.swap_in_place)
    with torch.no_grad():
        model[0].fill_(5.0)
    with reference.in_model():
        assert [held.tolist() for held in reference.held] == [[5.0, 5.0], [3.0]]


@pytest.mark.parametrize("placement", ReferencePlacement)
def test_weights_keep_their_storage(placement: ReferencePlacement) -> None:
    """Optimizers and communication buffers point at it."""
    model = parameters()
    places = [parameter.data_ptr() for parameter in model]
    with KeptWeights(lambda: model, placement).in_model():
        assert [parameter.data_ptr() for parameter in model] == places
    assert [parameter.data_ptr() for parameter in model] == places


@pytest.mark.parametrize("placement", ReferencePlacement)
def test_no_swap_takes_new_memory_on_the_host(placement: ReferencePlacement) -> None:
    model = parameters()
    reference = KeptWeights(lambda: model, placement)
    places = [held.data_ptr() for held in reference.held]
    for _ in range(2):
        with reference.in_model():
            assert [held.data_ptr() for held in reference.held] == places


def test_kept_weights_move_a_share_of_the_way_to_the_models() -> None:
    model = parameters()
    reference = KeptWeights(lambda: model, ReferencePlacement.swap_in_place)
    with torch.no_grad():
        model[0].copy_(torch.tensor([3.0, 0.0]))
    reference.mix(0.25)
    assert [held.tolist() for held in reference.held] == [[1.5, 1.5], [3.0]]
    reference.take()
    assert [held.tolist() for held in reference.held] == [[3.0, 0.0], [3.0]]
