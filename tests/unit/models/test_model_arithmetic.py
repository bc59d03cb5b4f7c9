from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like.models.model_arithmetic import (
    attention_flops_per_token,
    distinct_experts,
    forward_flops_per_token,
    kv_bytes_per_token,
    layer_flops_per_token,
    output_flops_per_token,
    training_flops_per_token,
    weights_read,
)
from nemo_like.models.model_info import ModelInfo, read_model_info
from tests.unit.config.checkpoints import REPOSITORY


def shape(name: str) -> ModelInfo:
    return read_model_info(str(REPOSITORY / "recipes" / "shapes" / name), "megatron")


def tiny(tmp_path: Path, **changes: object) -> ModelInfo:
    """2 layers, hidden 4, 2 heads of 3, 1 KV head, feed-forward 5, vocabulary 7."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 4,
        "intermediate_size": 5,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 3,
        "vocab_size": 7,
        "max_position_embeddings": 64,
    }
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    return read_model_info(str(tmp_path), "fsdp")  # takes models of any type


def tiny_mixture(tmp_path: Path) -> ModelInfo:
    sizes = {"moe_intermediate_size": 5, "num_experts": 4, "num_experts_per_tok": 1}
    return tiny(tmp_path, model_type="qwen3_moe", **sizes)


GLM45_AIR = {
    "model_type": "glm4_moe",
    "num_hidden_layers": 46,
    "hidden_size": 4096,
    "intermediate_size": 10_944,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_552,
    "attention_bias": True,
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
}


def small_glm(tmp_path: Path) -> ModelInfo:
    """3 layers, of which one is dense; feed-forward 5, 4 experts of 2, 2 shared ones, 1 chosen."""
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 1, "n_shared_experts": 2}
    sizes = {"num_hidden_layers": 3, "moe_intermediate_size": 2, "first_k_dense_replace": 1}
    return tiny(tmp_path, model_type="glm4_moe", **experts, **sizes)


def test_the_first_layers_of_a_mixture_may_be_dense(tmp_path: Path) -> None:
    model = small_glm(tmp_path)
    counts = model.parameters
    assert not model.has_qk_norm and model.has_qkv_bias
    # 72 and biases of 6 + 6; three matrices of 4 x 5, of 4 x 2 and of 4 x 4; 4 x 4 and a bias of 4.
    assert (counts.attention, counts.dense_ffn, counts.expert) == (84, 60, 24)
    assert (counts.shared_experts, counts.router) == (48, 20)
    assert counts.layer == 84 + 8 + 20 + 48 + 4 * 24
    assert [counts.experts_in(range(first, first + 1)) for first in range(3)] == [0, 96, 96]
    outside = [counts.outside_experts_in(range(first, first + 1)) for first in range(3)]
    assert outside == [84 + 8 + 60, 84 + 8 + 68, 84 + 8 + 68]
    assert counts.total == 28 + 28 + 4 + sum(outside) + 2 * 96
    assert counts.total - counts.active == 2 * 3 * 24
    assert layer_flops_per_token(model) == 2 * (3 * 72 + 60 + 2 * (16 + 48 + 24))


def test_glm_45_air_has_the_published_numbers_of_parameters(tmp_path: Path) -> None:
    counts = tiny(tmp_path, **GLM45_AIR).parameters
    assert counts.total == pytest.approx(106e9, abs=1e9)
    assert counts.active - counts.embeddings == pytest.approx(12e9, abs=0.5e9)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18_432,
    "num_attention_heads": 128,
    "vocab_size": 129_280,
}


def test_deepseek_v3_has_the_published_numbers_of_parameters(tmp_path: Path) -> None:
    counts = tiny(tmp_path, **DEEPSEEK_V3).parameters
    assert counts.total == pytest.approx(671.0e9, abs=0.1e9)
    assert counts.active == pytest.approx(37.5e9, abs=0.1e9)
    # 7168 x (1536 + 576) + 1536 x 128 x 192 + 512 x 128 x 256 + 128 x 128 x 7168, and both norms
    assert counts.attention == 187_107_328


def test_latent_attention_projects_in_two_steps_and_caches_a_latent(tmp_path: Path) -> None:
    """2 heads of 3 + 1 and values of 2; latents of 5 and 2."""
    sizes = {"qk_nope_head_dim": 3, "qk_rope_head_dim": 1, "v_head_dim": 2, "kv_lora_rank": 2}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 2, "n_group": 1}
    model = tiny(tmp_path, model_type="deepseek_v3", **sizes, **experts, q_lora_rank=5)
    without = tiny(tmp_path, model_type="deepseek_v3", **sizes, **experts, q_lora_rank=None)
    # 4 x 5 + 5 x 8 of queries or 4 x 8; 4 x 3 + 2 x 10 of keys and values; 4 x 4 of the output
    assert (model.projections, without.projections) == (60 + 32 + 16, 32 + 32 + 16)
    assert (model.parameters.attention, without.parameters.attention) == (108 + 7, 80 + 2)
    assert kv_bytes_per_token(model) == 2 * (2 + 1) * 2
    # Products of 4 values with keys and of 2 with probabilities, for 2 heads in 2 layers.
    assert attention_flops_per_token(model, 10) == 2 * 2 * (4 + 2) * 10 * 2


# By the model cards: 8.2 B, 6.95 B of them outside the embeddings; 30.5 B, 29.9 B and 3.3 B active.
def test_qwen3_8b_has_the_published_number_of_parameters() -> None:
    counts = shape("Qwen3-8B").parameters
    assert counts.total == counts.active == 8_190_735_360  # as the weight files have
    assert counts.embeddings == 2 * 151_936 * 4096
    assert counts.total - counts.embeddings == pytest.approx(6.95e9, abs=0.005e9)
    # 4096 x (2 x 4096 + 2 x 1024) + 2 x 128 of the norms
    assert (counts.attention, counts.dense_ffn) == (41_943_296, 3 * 4096 * 12_288)


def test_qwen3_30b_a3b_has_the_published_numbers_of_parameters() -> None:
    counts = shape("Qwen3-30B-A3B").parameters
    assert counts.total == 30_532_122_624  # as the weight files have
    assert counts.total - counts.embeddings == pytest.approx(29.9e9, abs=0.05e9)
    assert counts.active == pytest.approx(3.3e9, abs=0.06e9)
    assert (counts.expert, counts.experts) == (3 * 2048 * 768, 128 * 3 * 2048 * 768)
    assert counts.router == 2048 * 128


GEMMA3_1B = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 26,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "vocab_size": 262_144,
    "max_position_embeddings": 32_768,
    "sliding_window": 512,
}


def test_gemma_3_1b_has_the_parameters_of_its_weight_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_1B))
    model = read_model_info(str(tmp_path), "megatron")
    assert (model.num_parameters, model.full_layers) == (999_885_952, (5, 11, 17, 23))


def test_the_parameters_of_a_small_model_by_kind(tmp_path: Path) -> None:
    counts = tiny(tmp_path).parameters
    # Queries 4 x 6, keys and values 4 x 6, output 6 x 4; three matrices of 4 x 5; two norms of 4.
    assert (counts.attention, counts.dense_ffn, counts.layer_norms) == (72, 60, 8)
    assert (counts.input_embeddings, counts.output_layer, counts.final_norm) == (28, 28, 4)
    assert counts.layer == 140
    assert counts.total == counts.active == 28 + 28 + 2 * 140 + 4


OLMO3 = {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 10}


def test_norms_of_whole_projections_and_after_both_parts_are_counted(tmp_path: Path) -> None:
    counts = tiny(tmp_path, **OLMO3).parameters
    # As above, and 6 + 3 weights of the norms of queries and keys; two norms of 4, after the parts alone.
    assert (counts.attention, counts.layer_norms) == (72 + 9, 8)


def test_layers_without_the_window_attend_to_the_whole_context(tmp_path: Path) -> None:
    model = tiny(tmp_path, **OLMO3)
    assert model.full_layers == (3,)
    # 4 FLOPs x 2 heads of 3 for each token that one attends to; three layers of four have the window.
    assert attention_flops_per_token(model, 100) == 4 * 6 * (3 * 10 + 100)
    assert attention_flops_per_token(model, 8) == 4 * 6 * 4 * 8


def test_tied_embeddings_count_once_and_cost_their_flops_all_the_same(tmp_path: Path) -> None:
    model = tiny(tmp_path, tie_word_embeddings=True)
    assert model.parameters.embeddings == 28
    assert output_flops_per_token(model) == 2 * 28


def test_a_mixture_has_all_its_experts_and_a_token_meets_the_chosen_ones(tmp_path: Path) -> None:
    counts = tiny_mixture(tmp_path).parameters
    assert (counts.dense_ffn, counts.expert, counts.experts, counts.router) == (0, 60, 240, 16)
    assert counts.total - counts.active == 2 * 3 * 60


def test_a_counted_models_kinds_sum_to_what_was_counted(tmp_path: Path) -> None:
    tensors = {"weight": {"dtype": "F32", "shape": [500], "data_offsets": [0, 2000]}}
    header = json.dumps(tensors).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    model = tiny(tmp_path, model_type="other")
    # 500 less embeddings 56, final norm 4 and twice 72 + 8 leaves 280 for two layers.
    assert (model.num_parameters, model.parameters.total) == (500, 500)
    assert model.parameters.dense_ffn == 140


def test_the_flops_of_a_small_model(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    assert layer_flops_per_token(model) == 2 * 2 * (72 + 60)
    # Over 10 tokens: 2 layers x 2 heads x (10 products of 3 for the scores, and 10 x 3 for the values) x 2.
    assert attention_flops_per_token(model, 10) == 2 * 2 * (30 + 30) * 2
    assert forward_flops_per_token(model, 10) == 528 + 480 + 56
    assert training_flops_per_token(model, 10) == 3 * 1064


def test_a_token_pays_for_its_own_experts_and_for_the_router(tmp_path: Path) -> None:
    assert layer_flops_per_token(tiny_mixture(tmp_path)) == 2 * 2 * (72 + 60 + 16)


def test_without_context_training_costs_six_flops_for_each_active_parameter_outside_the_embedding() -> None:
    model = shape("Qwen3-30B-A3B")
    counts = model.parameters
    assert training_flops_per_token(model, 0) == pytest.approx(
        6 * (counts.active - counts.input_embeddings), rel=1e-3
    )


def test_the_kv_cache_has_a_key_and_a_value_for_each_layer_and_kv_head(tmp_path: Path) -> None:
    assert kv_bytes_per_token(tiny(tmp_path)) == 2 * 2 * 1 * 3 * 2
    assert kv_bytes_per_token(shape("Qwen3-8B")) == 2 * 36 * 8 * 128 * 2  # 147 kB
    assert kv_bytes_per_token(shape("Qwen3-8B"), bytes_per_value=1) == 2 * 36 * 8 * 128


def test_many_tokens_reach_all_experts_and_one_token_reaches_its_own(tmp_path: Path) -> None:
    model = tiny_mixture(tmp_path)
    assert distinct_experts(model, 1) == pytest.approx(1)
    assert distinct_experts(model, 2) == pytest.approx(4 * (1 - 0.75**2))
    assert distinct_experts(model, 1000) == pytest.approx(4)
    assert distinct_experts(tiny(tmp_path), 5) == 0


def test_a_pass_reads_the_weights_that_its_tokens_need(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    assert weights_read(model, 3) == model.num_parameters - 28  # rows of the input embedding are looked up
    mixture = tiny_mixture(tmp_path)
    counts = mixture.parameters
    assert weights_read(mixture, 1) == pytest.approx(counts.active - 28)
    assert weights_read(mixture, 1000) == pytest.approx(counts.total - 28)
