"""Megatron parameters from Hugging Face tensors and back, without a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from nemo_like.models.family import FAMILIES
from nemo_like.policy.backends.hf_checkpoint import HFCheckpoint
from nemo_like.policy.megatron.weight_conversion import (
    Geometry,
    ModelPart,
    cut,
    full_shape,
    in_whole_model,
    join,
    load_weights,
    merge,
    rule_for,
    rules_of_all_ranks,
    single_experts,
    split,
)

FAMILY = FAMILIES.load("qwen3_moe")
# 4 heads in 2 groups, head size 3, 10 tokens padded to 12
GEOMETRY = Geometry(
    num_attention_heads=4, num_query_groups=2, head_size=3, vocab_size=10, padded_vocab_size=12
)
HIDDEN, FFN = 5, 8
EXPERT = [(FFN, HIDDEN), (FFN, HIDDEN)]  # gate and up projection
SHAPES = {
    "embedding.word_embeddings.weight": [(10, HIDDEN)],
    "output_layer.weight": [(10, HIDDEN)],
    "decoder.final_layernorm.weight": [(HIDDEN,)],
    "decoder.layers.0.input_layernorm.weight": [(HIDDEN,)],
    "decoder.layers.0.self_attention.linear_qkv.weight": [(12, HIDDEN), (6, HIDDEN), (6, HIDDEN)],
    "decoder.layers.0.self_attention.linear_qkv.bias": [(12,), (6,), (6,)],
    "decoder.layers.0.self_attention.linear_proj.weight": [(HIDDEN, 12)],
    "decoder.layers.0.self_attention.q_layernorm.weight": [(3,)],
    "decoder.layers.0.mlp.linear_fc1.weight": [(FFN, HIDDEN), (FFN, HIDDEN)],
    "decoder.layers.0.mlp.linear_fc2.weight": [(HIDDEN, FFN)],
    # As Transformer Engine names the norms that it folds into linear layers.
    "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": [(HIDDEN,)],
    "decoder.layers.0.mlp.linear_fc1.layer_norm_weight": [(HIDDEN,)],
    # Experts one after the other, and in Transformer Engine's grouped layers.
    "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight": EXPERT,
    "decoder.layers.0.mlp.experts.linear_fc1.weight3": EXPERT,
    "decoder.layers.0.mlp.experts.linear_fc2.weight3": [(HIDDEN, FFN)],
}


def part(ep_rank: int = 0, ep_size: int = 1) -> ModelPart:
    return ModelPart(
        family=FAMILY,
        tp_rank=0,
        tp_size=1,
        ep_rank=ep_rank,
        ep_size=ep_size,
        etp_rank=0,
        etp_size=1,
        num_local_experts=8 // ep_size,
    )


def numbered(shapes: list[tuple[int, ...]]) -> list[Tensor]:
    """Tensors whose every value is different."""
    tensors, start = [], 0
    for shape in shapes:
        size = torch.Size(shape).numel()
        tensors.append(torch.arange(start, start + size, dtype=torch.float32).view(shape))
        start += size
    return tensors


@pytest.mark.parametrize("name", SHAPES)
@given(num_ranks=st.sampled_from([1, 2]))
def test_merging_cutting_joining_and_splitting_give_the_tensors_back(name: str, num_ranks: int) -> None:
    rule, parts = rule_for(name, part()), numbered(SHAPES[name])
    full = merge(rule, parts, GEOMETRY)
    local = [cut(rule, full, rank, num_ranks) for rank in range(num_ranks)]
    assert full_shape(rule, local[0].shape, num_ranks) == tuple(full.shape)
    back = split(rule, join(rule, local), GEOMETRY)
    assert len(rule.hf_names) == len(parts)
    assert [part.tolist() for part in back] == [part.tolist() for part in parts]


def test_queries_keys_and_values_lie_together_by_group() -> None:
    rule = rule_for("decoder.layers.0.self_attention.linear_qkv.bias", part())
    queries, keys, values = torch.arange(12.0), torch.arange(100.0, 106), torch.arange(200.0, 206)
    merged = merge(rule, [queries, keys, values], GEOMETRY).tolist()
    # Group 0: heads 0 and 1, its key, its value; then group 1.
    assert merged == [*range(6), 100, 101, 102, 200, 201, 202, *range(6, 12), 103, 104, 105, 203, 204, 205]
    assert cut(rule, torch.tensor(merged), 1, 2).tolist() == merged[12:]


def test_queries_keys_and_values_of_one_tensor_lie_as_those_of_three() -> None:
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    three = numbered(SHAPES[name])
    fused = rule_for(name, replace(part(), family=FAMILIES.load("phi3")))
    full = merge(fused, [torch.cat(three)], GEOMETRY)
    assert full.tolist() == merge(rule_for(name, part()), three, GEOMETRY).tolist()
    (back,) = split(fused, full, GEOMETRY)
    assert back.tolist() == torch.cat(three).tolist()


def test_an_expert_is_found_under_the_names_of_its_family() -> None:
    name = "decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight"
    rule = rule_for(name, replace(part(1, 2), family=FAMILIES.load("mixtral")))
    prefix = "model.layers.7.block_sparse_moe.experts.7"
    assert rule.hf_names == (f"{prefix}.w1.weight", f"{prefix}.w3.weight")


@pytest.mark.parametrize("leaf", ["weight", "bias"])
def test_gate_and_up_may_alternate_with_a_column_per_output(leaf: str) -> None:
    name = f"decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.{leaf}"
    rule = rule_for(name, replace(part(), family=FAMILIES.load("gpt_oss")))
    columns = torch.tensor([10.0, 20, 11, 21, 12, 22])  # gates are 10 to 12
    given = columns if leaf == "bias" else torch.stack((columns, -columns))
    full = merge(rule, [given], GEOMETRY)
    assert full.t().tolist() == torch.cat((given.t()[::2], given.t()[1::2])).t().tolist()
    assert full.flatten()[0] == 10 and full[1].flatten()[0] == 11 and full[3].flatten()[0] == 20
    (back,) = split(rule, full, GEOMETRY)
    assert back.tolist() == given.tolist()
    suffix = "" if leaf == "weight" else "_bias"
    assert rule.hf_names == (f"model.layers.0.mlp.experts.1.gate_up_proj{suffix}",)


def test_biases_in_one_parameter_are_those_of_single_experts() -> None:
    biases = torch.arange(4.0).view(2, 2)
    prefix = "decoder.layers.0.mlp.experts"
    found = [(name, bias.tolist()) for name, bias in single_experts([(f"{prefix}.linear_fc1.bias", biases)])]
    assert found == [
        (f"{prefix}.local_experts.0.linear_fc1.bias", [0, 1]),
        (f"{prefix}.local_experts.1.linear_fc1.bias", [2, 3]),
    ]


def test_every_rank_holds_its_part_of_the_gate_above_its_part_of_the_up_projection() -> None:
    rule = rule_for("decoder.layers.0.mlp.linear_fc1.weight", part())
    gate, up = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    full = merge(rule, [gate, up], GEOMETRY)
    assert cut(rule, full, 0, 2).tolist() == [[1.0], [3.0]]
    assert cut(rule, full, 1, 2).tolist() == [[2.0], [4.0]]


def test_layers_are_named_by_their_place_in_the_whole_model() -> None:
    assert in_whole_model("output_layer.weight", 6) == "output_layer.weight"
    rule = rule_for(in_whole_model("decoder.layers.1.mlp.linear_fc2.weight", 6), part())
    assert rule.hf_names == ("model.layers.7.mlp.down_proj.weight",)


def test_a_parameter_of_no_supported_model_is_an_error() -> None:
    with pytest.raises(KeyError, match="gate_weight"):
        rule_for("decoder.layers.0.mlp.shared_experts.gate_weight", part())


def test_an_expert_is_named_by_its_place_among_the_experts_of_all_ranks() -> None:
    rule = rule_for("decoder.layers.7.mlp.experts.local_experts.3.linear_fc1.weight", part(1, 2))
    assert rule.hf_names == (
        "model.layers.7.mlp.experts.7.gate_proj.weight",
        "model.layers.7.mlp.experts.7.up_proj.weight",
    )


@pytest.mark.parametrize("layer", ["linear_fc1", "linear_fc2"])
def test_an_expert_has_one_rule_whatever_layer_holds_it(layer: str) -> None:
    alone = rule_for(f"decoder.layers.1.mlp.experts.local_experts.3.{layer}.weight", part(1, 2))
    assert rule_for(f"decoder.layers.1.mlp.experts.{layer}.weight3", part(1, 2)) == alone


def test_experts_in_one_parameter_are_filled_and_read_one_by_one() -> None:
    prefix = "decoder.layers.0.mlp"
    together, router = torch.nn.Parameter(torch.zeros(4, 2, 3)), torch.nn.Parameter(torch.zeros(4, 3))
    parameters = [(f"{prefix}.experts.weight2", together), (f"{prefix}.router.weight", router)]
    for number, (_, parameter) in enumerate(single_experts(parameters)):
        parameter.data.fill_(number)
    names = [name for name, _ in single_experts(parameters)]
    experts = [f"{prefix}.experts.local_experts.{index}.linear_fc2.weight" for index in range(4)]
    assert names == [*experts, f"{prefix}.router.weight"]
    assert together[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert router[0, 0] == 4


def test_all_ranks_give_their_experts_and_one_gives_what_they_share() -> None:
    expert = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    names = [rule.hf_names for rule in rules_of_all_ranks(expert, part(ep_rank=1, ep_size=4))]
    assert names == [(f"model.layers.0.mlp.experts.{index}.down_proj.weight",) for index in (1, 3, 5, 7)]
    (router,) = rules_of_all_ranks("decoder.layers.0.mlp.router.weight", part(ep_rank=1, ep_size=4))
    assert router.hf_names == ("model.layers.0.mlp.gate.weight",)


def test_an_expert_is_whole_on_its_rank_unless_ranks_share_it() -> None:
    rule = rule_for("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", part())
    gate, up = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])
    full = merge(rule, [gate, up], GEOMETRY)
    second = replace(part(), tp_rank=1, tp_size=2)
    assert cut(rule, full, *second.cut_of(rule)).tolist() == [[1.0], [2.0], [3.0], [4.0]]
    assert [half.tolist() for half in split(rule, full, GEOMETRY)] == [gate.tolist(), up.tolist()]


def test_tensors_are_found_in_every_file_of_a_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.tensor([1.0])}, tmp_path / "one.safetensors")
    save_file({"b": torch.tensor([2.0])}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    checkpoint = HFCheckpoint(tmp_path)
    assert (checkpoint["a"].item(), checkpoint["b"].item()) == (1.0, 2.0)
    with pytest.raises(KeyError, match="no tensor 'c'"):
        checkpoint["c"]


def test_a_directory_without_safetensors_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="save_pretrained"):
        HFCheckpoint(tmp_path)


def test_weights_that_do_not_fit_the_configuration_are_refused_by_name(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.zeros(7)}, tmp_path / "model.safetensors")
    parameter = torch.nn.Parameter(torch.zeros(HIDDEN))
    with pytest.raises(ValueError, match=r"model\.norm\.weight .* give \(7,\) for decoder\.final_layernorm"):
        load_weights(
            iter([("decoder.final_layernorm.weight", parameter)]),
            HFCheckpoint(tmp_path),
            GEOMETRY,
            part(),
        )


def test_ranks_that_share_an_expert_cut_it_as_other_layers_are_cut() -> None:
    rule = rule_for("decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight", part())
    full = torch.arange(8.0)[:, None]  # rows 0 to 3 are the gate, 4 to 7 the up projection
    assert cut(rule, full, 1, 2).flatten().tolist() == [2, 3, 6, 7]
    assert torch.equal(join(rule, [cut(rule, full, rank, 2) for rank in range(2)]), full)
    shared = replace(part(), tp_rank=3, tp_size=4, etp_rank=1, etp_size=2)
    assert shared.cut_of(rule) == (1, 2)
    assert shared.cut_of(rule_for("decoder.final_layernorm.weight", part())) == (3, 4)
