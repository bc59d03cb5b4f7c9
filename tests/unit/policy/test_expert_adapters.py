"""Adapters of experts: how a rank holds them, what peft saves, and what they add."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from nemo_like.models.weight_names import Merge
from nemo_like.policy.megatron.expert_adapters import (
    ExpertAdapters,
    as_saved,
    place_beside,
    stacked_a,
    stacked_b,
)
from nemo_like.policy.megatron.experts import GroupedExperts
from nemo_like.policy.megatron.weight_conversion import expert_of, rule_for
from tests.unit.policy.test_megatron_lora import RANK, SCALING, WHOLE, settings

NUM_EXPERTS, HIDDEN, FFN = 2, 8, 16
LAYERS = {"linear_fc1": (2 * FFN, HIDDEN), "linear_fc2": (HIDDEN, FFN)}
TARGETS = ("gate_proj", "up_proj", "down_proj")
MIXTURE = replace(WHOLE, num_local_experts=NUM_EXPERTS)


def made(layer: str, part: Any = MIXTURE) -> ExpertAdapters:
    rule = rule_for(f"decoder.layers.1.mlp.experts.local_experts.0.{layer}.weight", part)
    shape = list(LAYERS[layer])
    shape[layer == "linear_fc2"] //= part.etp_size
    return ExpertAdapters(rule, torch.empty(shape), (1, layer), settings(*TARGETS, part=part))


def with_values(adapters: ExpertAdapters) -> ExpertAdapters:
    torch.manual_seed(3)
    with torch.no_grad():
        for part in adapters.parts:
            part.parameter.normal_()
    return adapters


def test_peft_has_the_ranks_of_an_experts_a_together_and_the_experts_of_a_rank_of_b() -> None:
    a = torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]])  # 2 experts of rank 2, 1 input
    assert as_saved(a, Merge.stacked)[:, 0].tolist() == [1, 2, 3, 4]
    b = torch.tensor([[[[1.0, 2.0]]], [[[3.0, 4.0]]]])  # 1 layer with 1 output
    assert as_saved(b, Merge.stacked).tolist() == [[1, 3, 2, 4]]
    random_a, random_b = torch.randn(3, 4, 5), torch.randn(3, 2, 5, 4)
    for merge in (Merge.stacked, Merge.alternating):
        assert torch.equal(stacked_a(as_saved(random_a, merge), 3), random_a)
        assert torch.equal(stacked_b(as_saved(random_b, merge), 3, 2, merge), random_b)


def test_peft_has_the_outputs_of_gate_and_up_in_turn_where_a_checkpoint_has_them_so() -> None:
    b = torch.tensor([[[[1.0], [2.0]], [[3.0], [4.0]]]])  # 1 expert, 2 layers with 2 outputs, rank 1
    assert as_saved(b, Merge.stacked)[:, 0].tolist() == [1, 2, 3, 4]
    assert as_saved(b, Merge.alternating)[:, 0].tolist() == [1, 3, 2, 4]


def test_peft_saves_one_adapter_for_gate_and_up_and_one_for_down() -> None:
    experts = "base_model.model.model.layers.1.mlp.experts"
    shapes = {part.name: part.full_shape for layer in LAYERS for part in made(layer).parts}
    assert shapes == {
        f"{experts}.base_layer.lora_A.weight": (NUM_EXPERTS * RANK, HIDDEN),
        f"{experts}.base_layer.lora_B.weight": (2 * FFN, RANK * NUM_EXPERTS),
        f"{experts}.lora_A.weight": (NUM_EXPERTS * RANK, FFN),
        f"{experts}.lora_B.weight": (HIDDEN, RANK * NUM_EXPERTS),
    }


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (1, 2), (2, 2)])
def test_the_ranks_parts_are_the_whole(layer: str, ep: int, etp: int) -> None:
    """In the order in which they are gathered; their first values are those of the whole."""
    size = {"num_local_experts": NUM_EXPERTS // ep, "ep_size": ep, "etp_size": etp}
    ranks = [
        made(layer, replace(MIXTURE, ep_rank=ep_rank, etp_rank=etp_rank, **size))
        for ep_rank in range(ep)
        for etp_rank in range(etp)
    ]
    whole = made(layer)
    for part, *parts in zip(whole.parts, *(rank.parts for rank in ranks), strict=True):
        full = parts[0].joined([one.parameter.detach() for one in parts])
        assert parts[0].full_shape == tuple(full.shape) == part.full_shape
        torch.testing.assert_close(full, part.joined([part.parameter.detach()]), rtol=0, atol=0)
        marks = [getattr(parts[0].parameter, name, False) for name in ("allreduce", "tensor_model_parallel")]
        is_cut = parts[0].parameter.numel() < part.parameter.numel() // ep
        assert marks == [ep == 1, is_cut or (ep > 1 and etp == 1)]


@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_added_is_what_is_merged(layer: str) -> None:
    adapters, (outputs, inputs) = with_values(made(layer)), LAYERS[layer]
    weights = torch.randn(NUM_EXPERTS, outputs, inputs)
    down, up = (part.parameter for part in adapters.parts)
    for index, weight in enumerate(weights):
        delta = SCALING * up[index].flatten(0, 1) @ down[index]
        torch.testing.assert_close(adapters.merged(index, weight), weight + delta)
        hidden = torch.randn(5, inputs)
        torch.testing.assert_close(adapters.of_expert(index, hidden), hidden @ delta.T)
    hidden, ends = torch.randn(5, inputs), torch.tensor([3, 5], dtype=torch.int32)
    expected = torch.cat([adapters.of_expert(i, one) for i, one in enumerate(hidden.split([3, 2]))])
    torch.testing.assert_close(adapters(hidden, ends), expected)


class Grouped(nn.Module):
    """Stands in for Transformer Engine's layer, whose second argument has the experts' numbers of tokens."""

    def forward(self, hidden: Tensor, num_tokens: list[int]) -> tuple[Tensor, None]:
        return torch.zeros(len(hidden), HIDDEN), None


def test_experts_of_one_matrix_product_add_it_too_and_not_while_adapters_are_disabled() -> None:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=NUM_EXPERTS,
        moe_ffn_hidden_size=FFN,
        add_bias_linear=False,
        use_cpu_initialization=True,
    )
    own = GroupedExperts(NUM_EXPERTS, config, pg_collection=SimpleNamespace(ep=alone, expt_dp=alone))
    merged = GroupedExperts(NUM_EXPERTS, config, pg_collection=SimpleNamespace(ep=alone, expt_dp=alone))
    other = nn.ModuleDict({"linear_fc2": Grouped()})
    torch.manual_seed(4)
    with torch.no_grad():
        for name, layer in {"weight1": "linear_fc1", "weight2": "linear_fc2"}.items():
            weight = nn.init.normal_(getattr(own, name), std=0.1)
            beside = with_values(made(layer))
            place_beside(own, layer, beside)
            for index, one in enumerate(weight):
                getattr(merged, name)[index] = beside.merged(index, one)
        place_beside(other, "linear_fc2", beside)
    hidden, counts, scales = torch.randn(5, HIDDEN), torch.tensor([3, 2]), torch.rand(5)
    torch.testing.assert_close(
        own(hidden, counts, scales), merged(hidden, counts, scales), rtol=1e-4, atol=1e-4
    )
    inputs = torch.randn(5, FFN)
    added, _ = other["linear_fc2"](inputs, [3, 2])
    torch.testing.assert_close(added, beside(inputs, torch.tensor([3, 5], dtype=torch.int32)))
    beside.is_enabled = False
    assert not other["linear_fc2"](inputs, [3, 2])[0].any()


def test_an_experts_weight_belongs_to_a_linear_layer_of_all_experts() -> None:
    for name in ("local_experts.3.linear_fc1.weight", "linear_fc1.weight3"):
        place = expert_of(f"decoder.layers.7.mlp.experts.{name}")
        assert place == ("decoder.layers.7.mlp.experts.linear_fc1", 3)
    assert expert_of("decoder.layers.7.mlp.router.weight") is None
    assert expert_of("output_layer.weight") is None
