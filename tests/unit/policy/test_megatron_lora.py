from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from nemo_like.models.family import FAMILIES
from nemo_like.policy.megatron import lora
from nemo_like.policy.megatron.lora import AdapterSettings, LayerAdapters, without_fused_norms
from nemo_like.policy.megatron.weight_conversion import Geometry, ModelPart, merge, rule_for
from nemo_like.policy.options import LoraConfig

FAMILY = FAMILIES.load("qwen3")
GEOMETRY = Geometry(num_attention_heads=4, num_query_groups=2, head_size=3, vocab_size=8, padded_vocab_size=8)
WHOLE = ModelPart(
    family=FAMILY,
    tp_rank=0,
    tp_size=1,
    ep_rank=0,
    ep_size=1,
    etp_rank=0,
    etp_size=1,
    num_local_experts=0,
)
HIDDEN, RANK, SCALING = 5, 2, 3.0


def settings(*targets: str, part: ModelPart = WHOLE) -> AdapterSettings:
    config = LoraConfig(
        enabled=True,
        rank=RANK,
        alpha=SCALING * RANK,
        dropout=0.0,
        target_modules=list(targets),
        exclude_modules=[],
        use_rslora=False,
        adapter_path=None,
    )
    return AdapterSettings(config, GEOMETRY, part, sequence_parallel=False)


def with_values(adapters: LayerAdapters) -> LayerAdapters:
    with torch.no_grad():
        for part in adapters.parts:
            part.parameter.normal_()
    return adapters


def test_queries_keys_and_values_get_adapters_of_their_own_in_the_order_of_the_fused_layer() -> None:
    rule = rule_for("decoder.layers.0.self_attention.linear_qkv.weight", WHOLE)
    fused = torch.randn(4 * 3 + 2 * 2 * 3, HIDDEN)
    adapters = with_values(LayerAdapters(rule, fused, settings("q_proj", "v_proj")))
    prefix = "base_model.model.model.layers.0.self_attn"
    found = {part.name: part.parameter for part in adapters.parts}
    assert {name: tuple(value.shape) for name, value in found.items()} == {
        f"{prefix}.q_proj.lora_A.weight": (RANK, HIDDEN),
        f"{prefix}.q_proj.lora_B.weight": (12, RANK),
        f"{prefix}.v_proj.lora_A.weight": (RANK, HIDDEN),
        f"{prefix}.v_proj.lora_B.weight": (6, RANK),
    }
    delta_q, delta_v = (
        SCALING * found[f"{prefix}.{name}.lora_B.weight"] @ found[f"{prefix}.{name}.lora_A.weight"]
        for name in ("q_proj", "v_proj")
    )
    delta = merge(rule, [delta_q, torch.zeros(6, HIDDEN), delta_v], GEOMETRY)
    torch.testing.assert_close(adapters.merged(fused), fused + delta)
    hidden = torch.randn(7, 1, HIDDEN)
    torch.testing.assert_close(adapters(hidden), hidden @ delta.T)


@pytest.mark.parametrize(
    ("layer", "shapes"),
    [
        ("mlp.linear_fc1", [(RANK, HIDDEN), (6, RANK)]),  # by rows: B is cut
        ("mlp.linear_fc2", [(RANK, 6), (HIDDEN, RANK)]),  # by columns: A is cut
    ],
)
def test_an_adapter_is_cut_as_the_weight_beside_it(layer: str, shapes: list[tuple[int, int]]) -> None:
    name = f"decoder.layers.0.{layer}.weight"
    parts = [
        ModelPart(
            family=FAMILY,
            tp_rank=rank,
            tp_size=2,
            ep_rank=0,
            ep_size=1,
            etp_rank=0,
            etp_size=1,
            num_local_experts=0,
        )
        for rank in range(2)
    ]
    weight = torch.zeros(12, HIDDEN) if layer == "mlp.linear_fc1" else torch.zeros(HIDDEN, 6)
    targets = ("up_proj", "down_proj")
    whole = LayerAdapters(
        rule_for(name, WHOLE),
        torch.cat([weight, weight], dim=1 if layer == "mlp.linear_fc2" else 0),
        settings(*targets),
    )
    ranks = [LayerAdapters(rule_for(name, part), weight, settings(*targets, part=part)) for part in parts]
    for full, *cut in zip(whole.parts, *(rank.parts for rank in ranks), strict=True):
        marked = [getattr(part.parameter, "tensor_model_parallel", False) for part in cut]
        is_cut = full.parameter.shape != cut[0].parameter.shape
        assert marked == [is_cut, is_cut]
        halves = [part.parameter for part in cut]
        axis = getattr(halves[0], "partition_dim", 0)
        torch.testing.assert_close(torch.cat(halves, axis) if is_cut else halves[1], full.parameter)
    assert [tuple(part.parameter.shape) for part in ranks[0].parts] == shapes


class FusedLinear: ...


class Linear: ...


class Norm: ...


class WithFusedNorms:
    """Stands in for Transformer Engine's layers, which only exist where it is installed."""

    def column_parallel_layer_norm_linear(self) -> type:
        return FusedLinear

    def column_parallel_linear(self) -> type:
        return Linear

    def layer_norm(self) -> type:
        return Norm


@pytest.mark.parametrize("num_experts", [None, 4])
def test_an_adapter_never_stands_beside_a_layer_that_norms_its_input(
    monkeypatch: pytest.MonkeyPatch, num_experts: int | None
) -> None:
    monkeypatch.setattr(lora, "TESpecProvider", WithFusedNorms)
    spec: Any = get_gpt_layer_local_spec(num_experts=num_experts, moe_grouped_gemm=False)
    norm = spec.submodules.pre_mlp_layernorm
    attention, mlp = spec.submodules.self_attention.submodules, spec.submodules.mlp.submodules
    attention.linear_qkv = FusedLinear
    if num_experts is None:
        mlp.linear_fc1 = FusedLinear
    without_fused_norms(spec)
    assert (attention.linear_qkv, spec.submodules.input_layernorm) == (Linear, Norm)
    if num_experts is None:
        assert (mlp.linear_fc1, spec.submodules.pre_mlp_layernorm) == (Linear, Norm)
    else:
        assert spec.submodules.pre_mlp_layernorm is norm


def test_megatron_cores_own_layers_stay_as_they_are() -> None:
    spec = get_gpt_layer_local_spec()
    assert isinstance(spec, ModuleSpec)
    before = repr(spec)
    without_fused_norms(spec)
    assert repr(spec) == before
