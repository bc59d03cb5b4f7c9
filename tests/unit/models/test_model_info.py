from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.models.model_info import ModelInfo, has_vision_tower, is_here, planned_shape, read_model_info
from nemo_like.models.rope import Rope
from nemo_like.policy.options import BACKEND_KINDS

QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 97,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 128,
}
MIXTURE = {"moe_intermediate_size": 24, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
LLAMA31_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def checkpoint(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps(QWEN3 | changes))
    return path


def described(path: Path) -> ModelInfo:
    return read_model_info(str(path), "megatron")


def test_qwen3_has_query_key_norms_and_a_head_size_of_its_own(tmp_path: Path) -> None:
    model = described(checkpoint(tmp_path, tie_word_embeddings=True))
    assert (model.has_qk_norm, model.has_qkv_bias, model.has_tied_embeddings) == (True, False, True)
    assert (model.head_size, model.num_kv_heads) == (32, 2)


def test_qwen2_has_attention_biases_and_heads_that_share_the_hidden_size(tmp_path: Path) -> None:
    model = described(checkpoint(tmp_path, model_type="qwen2", head_dim=None))
    assert (model.has_qk_norm, model.has_qkv_bias, model.has_tied_embeddings) == (False, True, False)
    assert model.head_size == 16


def test_null_leaves_out_a_number(tmp_path: Path) -> None:
    assert described(checkpoint(tmp_path, rms_norm_eps=None)).norm_epsilon == 1e-6


def test_without_key_value_heads_every_head_has_its_own(tmp_path: Path) -> None:
    assert described(checkpoint(tmp_path, num_key_value_heads=None)).num_kv_heads == 4


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
def test_a_mixture_has_the_size_of_one_expert(tmp_path: Path, key: str) -> None:
    sizes = {name: value for name, value in MIXTURE.items() if name != "num_experts"} | {key: 8}
    model = described(checkpoint(tmp_path, model_type="qwen3_moe", **sizes))
    assert (model.num_experts, model.num_experts_per_token) == (8, 2)
    assert model.normalises_chosen_experts
    assert (model.intermediate_size, model.has_qk_norm) == (24, True)


def test_a_mixture_with_layers_that_have_no_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="layers without experts"):
        described(checkpoint(tmp_path, model_type="qwen3_moe", mlp_only_layers=[0], **MIXTURE))


def test_the_embedding_is_padded_to_a_multiple_of_the_ranks(tmp_path: Path) -> None:
    model = described(checkpoint(tmp_path))
    assert [model.padded_vocab_size(tp) for tp in (1, 2, 4)] == [97, 98, 100]


@pytest.mark.parametrize(
    ("changes", "theta", "factor"),
    [
        ({}, 1e4, None),
        ({"rope_theta": 1e6}, 1e6, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": LLAMA31_ROPE}, 5e5, 32.0),
        ({"rope_parameters": LLAMA31_ROPE | {"rope_theta": 5e5}}, 5e5, 32.0),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": None}}, 1e4, None),
    ],
)
def test_rope_is_read_as_old_and_new_transformers_write_it(
    tmp_path: Path, changes: dict[str, Any], theta: float, factor: float | None
) -> None:
    model = described(checkpoint(tmp_path, **changes))
    assert (model.rope_theta, model.rope_scaling_factor) == (theta, factor)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "is a model of type 'gpt2'; supported are .*llama, .*qwen2, qwen3"),
        ({"attention_bias": True}, "has attention_bias=true, which is not supported"),
        ({"use_sliding_window": True}, "has use_sliding_window=true, which is not supported"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope scaling .*yarn.* which is not supported"),
        (
            {"rope_scaling": LLAMA31_ROPE | {"high_freq_factor": 8.0}},
            "rope scaling .* which is not supported",
        ),
    ],
)
def test_what_the_conversion_does_not_cover_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        described(checkpoint(tmp_path, **changes))


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("mistral", {"hidden_act": "gelu"}, 'hidden_act="gelu", which is not supported'),
        ("phi3", {"rope_scaling": {"type": "longrope"}}, "rope scaling .*longrope.* which is not supported"),
        ("seed_oss", {"attention_bias": False}, "attention_bias=false, which is not supported; use a checkp"),
        ("seed_oss", {"attention_out_bias": True}, "attention_out_bias=true"),
        ("ernie4_5", {"use_bias": True}, "use_bias=true"),
        ("gemma3_text", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which is not supp"),
        ("gemma3_text", {"hidden_activation": "gelu"}, 'hidden_activation="gelu", which is not supported'),
        (
            "olmo2",
            {"rope_scaling": {"type": "linear", "factor": 8.0}},
            "rope scaling .* which is not supported",
        ),
        (
            "olmo3",
            {"rope_scaling": {"type": "llama3"}},
            "with none, or with a linear one, or YaRN without ms",
        ),
        ("olmo3", {"layer_types": ["chunked_attention"] * 2}, r"layers of types chunked_attention, which is"),
        ("mixtral", {}, "without a positive integer for num_experts, num_experts_per_tok"),
        ("deepseek_v3", {"scoring_func": "softmax"}, 'scoring_func="softmax", which is not supported'),
        (
            "deepseek_v3",
            {"n_group": 4, "topk_group": 2},
            "chooses 8 experts from 2 groups, and .* 2 from each",
        ),
        ("deepseek_v3", {"rope_scaling": {"type": "linear"}}, "with none, or with YaRN with mscale and ms"),
        ("kimi_k2", {"kv_lora_rank": None}, "without a positive integer for kv_lora_rank"),
        (
            "kimi_k2",
            {"quantization_config": {"quant_method": "gptq"}},
            r"in fewer than 16 bits \(gptq\); use",
        ),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse", "dense"]},
            "mlp_layer_types other than 1 dense layers before all others; set policy.backend=fsdp",
        ),
        (
            "olmo3",
            {"layer_types": ["full_attention"]},
            "has 1 layer_types for num_hidden_layers=2; mend conf",
        ),
        ("mistral", {"sliding_window": 0}, "has sliding_window=0, which must be a positive integer or null"),
        (
            "mixtral",
            {"num_local_experts": 4, "num_experts_per_tok": 5},
            "has num_experts_per_tok=5, and 4 experts; mend config.json",
        ),
        (
            "deepseek_v3",
            {"n_routed_experts": 8, "n_group": 3, "topk_group": 4},
            "has n_group=3, which does not divide its 8 experts",
        ),
        ("qwen3", {"rope_parameters": "yarn"}, 'has rope_parameters="yarn" in config.json, which must be an'),
        ("qwen3", {"quantization_config": "fp8"}, 'has quantization_config="fp8" in config.json'),
        ("qwen3", {"head_dim": "32"}, 'has head_dim="32" in config.json, which must be a number >'),
        ("qwen2", {"rms_norm_eps": True}, "has rms_norm_eps=true in config.json, which must be a number"),
        ("llama", {"rope_theta": -1}, "has rope_theta=-1 in config.json, which must be a number >= 0"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "llama3", "factor": "8"}},
            'has factor="8" in config.json, which must be a number',
        ),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_theta": [5e5]}}},
            r"has rope_theta=\[500000.0\] in config.json",
        ),
        ("deepseek_v3", {"n_shared_experts": "one"}, 'has n_shared_experts="one" in config.json'),
        ("gemma3_text", {"query_pre_attn_scalar": "256"}, "a positive integer for query_pre_attn_scalar"),
        ("gemma3_text", {"query_pre_attn_scalar": 0}, "a positive integer for query_pre_attn_scalar"),
        (None, {}, "has a config.json without model_type; name the type"),
        ("gpt_oss", {"swiglu_limit": 6.0}, "another swiglu_limit than 7.0, and vLLM computes with that"),
        ("gpt_oss", {"rms_norm_eps": 1e-5}, "rope scaling .*; use a checkpoint with YaRN without mscale"),
        (
            "minimax_m2",
            {"use_qk_norm": False},
            "has use_qk_norm=false, .*; use a checkpoint with these norms",
        ),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, r"in fewer than 16 bits \(fp8\); use"),
        ("qwen3", {"quantization_config": {"quant_method": "mxfp4"}}, r"\(mxfp4\); scripts/dequantise_ch"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
            r"in fewer than 16 bits \(fp8\); scripts/dequantise",
        ),
    ],
)
def test_a_family_says_what_of_it_is_refused(
    tmp_path: Path, model_type: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        described(checkpoint(tmp_path, model_type=model_type, **changes))


def test_the_share_that_rotates_is_read_where_the_family_has_one(tmp_path: Path) -> None:
    shares = [
        described(checkpoint(tmp_path, model_type=model_type, **changes)).rotated_share
        for model_type in ("phi3", "qwen3")
        for changes in (
            {"partial_rotary_factor": 0.75},
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            {},
        )
    ]
    assert shares == [0.75, 0.5, 1.0, 1.0, 1.0, 1.0]


def test_the_norms_of_queries_and_keys_may_be_left_out(tmp_path: Path) -> None:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    glm = {"model_type": "glm4_moe", "attention_bias": True, "routed_scaling_factor": 2.5, **experts}
    models = [described(checkpoint(tmp_path, **glm, use_qk_norm=value)) for value in (True, False)]
    assert [model.has_qk_norm for model in models] == [True, False]
    assert {(one.num_dense_layers, one.shared_ffn_size, one.routed_scale) for one in models} == {(0, 0, 2.5)}


@pytest.mark.parametrize(
    ("model_type", "changes", "window"),
    [
        ("mistral", {"sliding_window": 100}, 100),
        ("mistral", {"sliding_window": None}, None),
        ("mistral", {}, 4096),  # as transformers takes it
        ("phi3", {}, None),
        ("qwen3", {"sliding_window": 100}, None),
        ("olmo3", {"layer_types": ["full_attention", "full_attention"]}, None),
        ("olmo3", {"layer_types": ["full_attention", "sliding_attention"]}, 4096),
    ],
)
def test_a_window_is_read_where_the_family_has_one(
    tmp_path: Path, model_type: str, changes: dict[str, Any], window: int | None
) -> None:
    assert described(checkpoint(tmp_path, model_type=model_type, **changes)).window == window


def test_the_sizes_of_latent_attention_are_those_of_queries_keys_and_values(tmp_path: Path) -> None:
    """The head of a query and of a key has 128 values and 64 that rotate."""
    model = described(checkpoint(tmp_path, model_type="deepseek_v3", head_dim=64))
    assert (model.head_size, model.value_size, model.rotated_size) == (192, 128, 64)
    assert (model.num_kv_heads, model.num_cached_heads, model.cached_width) == (4, 1, 576)
    assert model.key_value_width == 4 * (192 + 128)
    assert (model.num_expert_groups, model.num_chosen_groups) == (8, 4)
    assert model.query_scale == 192**-0.5
    plain = described(checkpoint(tmp_path))
    assert (plain.value_size, plain.num_cached_heads, plain.cached_width) == (32, 2, 2 * 2 * 32)


def test_weights_in_8_bits_are_known(tmp_path: Path) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert described(checkpoint(tmp_path, quantization_config=settings)).quantization == "fp8"
    assert described(checkpoint(tmp_path)).quantization is None


def test_a_window_matters_where_a_sequence_is_longer(tmp_path: Path) -> None:
    model = described(checkpoint(tmp_path, model_type="mistral", sliding_window=100))
    assert [model.window_within(length) for length in (100, 101)] == [None, 100]


def test_what_config_json_of_gemma_3_leaves_out_is_as_transformers_takes_it(tmp_path: Path) -> None:
    model = described(checkpoint(tmp_path, model_type="gemma3_text", num_hidden_layers=7, head_dim=256))
    assert (model.has_tied_embeddings, model.window, model.full_layers) == (True, 4096, (5,))
    assert model.query_scale == 1 / 16
    assert model.ropes == (Rope(theta=1e4), Rope(theta=1e6))
    assert described(checkpoint(tmp_path)).query_scale is None


def test_layers_without_the_window_are_listed_or_follow_a_pattern(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    models = [
        described(checkpoint(tmp_path, model_type=model_type, num_hidden_layers=9, **changes))
        for model_type in ("olmo3", "mistral")
        for changes in ({"layer_types": types * 3}, {})
    ]
    assert [model.full_layers for model in models] == [(1, 2, 4, 5, 7, 8), (3, 7), (), ()]


def test_experts_of_mixtral_have_the_feed_forward_size_and_weights_that_sum_to_1(tmp_path: Path) -> None:
    model = described(checkpoint(tmp_path, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2))
    assert (model.intermediate_size, model.num_experts, model.normalises_chosen_experts) == (96, 8, True)


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        described(tmp_path)


def test_another_backend_trains_models_whatever_their_rope(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, rope_scaling={"type": "yarn", "factor": 4.0})
    assert read_model_info(str(path), "fsdp").rope_scaling_factor is None


def vision_language(path: Path, model_type: str = "qwen2_5_vl", **changes: Any) -> Path:
    content = {
        "model_type": model_type,
        "text_config": {**QWEN3, "model_type": "qwen2_5_vl_text", "tie_word_embeddings": False},
        "vision_config": {"hidden_size": 1280},
        "tie_word_embeddings": True,
        "image_token_id": 90,
        "video_token_id": 91,
    }
    (path / "config.json").write_text(json.dumps(content | changes))
    return path


def test_an_image_text_model_has_the_sizes_of_its_language_model(tmp_path: Path) -> None:
    model = read_model_info(str(vision_language(tmp_path)), "fsdp")
    assert (model.model_type, model.hidden_size, model.num_layers) == ("qwen2_5_vl", 64, 2)
    assert (model.has_vision_tower, model.has_tied_embeddings) == (True, True)
    assert model.placeholder_ids == (90, 91)
    assert has_vision_tower(str(tmp_path))


def test_sizes_beside_the_vision_config_are_those_of_the_language_model_too(tmp_path: Path) -> None:
    path = vision_language(
        tmp_path, text_config=None, **{k: v for k, v in QWEN3.items() if k != "model_type"}
    )
    assert read_model_info(str(path), "fsdp").hidden_size == 64


def test_megatron_refuses_a_vision_tower_by_name(tmp_path: Path) -> None:
    message = (
        r"has a vision tower \(it is of type 'qwen2_5_vl'\), which policy.backend=megatron does not train; "
    )
    with pytest.raises(ConfigError, match=message + "set policy.backend=fsdp"):
        described(vision_language(tmp_path))


def test_an_unknown_vision_tower_is_refused_by_every_backend(tmp_path: Path) -> None:
    path = vision_language(tmp_path, "gemma3")
    for backend in BACKEND_KINDS.names():
        with pytest.raises(
            ConfigError, match=r"of type 'gemma3'\) that is not supported; use one of type qwen2"
        ):
            read_model_info(str(path), backend)


def test_a_directory_without_config_has_no_vision_tower(tmp_path: Path) -> None:
    assert not has_vision_tower(str(tmp_path))
    assert not has_vision_tower(str(checkpoint(tmp_path)))


def test_a_directory_with_config_json_alone_has_the_sizes_for_a_plan_and_is_no_model(tmp_path: Path) -> None:
    model = tmp_path / "Qwen3-8B"
    assert not is_here(str(model))
    shipped = planned_shape(str(model))
    assert shipped is not None and shipped != model
    model.mkdir()
    shutil.copy(shipped / "config.json", model)
    assert not is_here(str(model))
    assert planned_shape(str(model)) == model
    (model / "tokenizer.json").touch()
    assert is_here(str(model))


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
}


@pytest.mark.parametrize("method", ["mxfp4", None])
def test_gpt_oss_rotates_by_yarn_in_all_layers_and_may_be_in_mxfp4(
    tmp_path: Path, method: str | None
) -> None:
    by = None if method is None else {"quant_method": method}
    model = described(checkpoint(tmp_path, **GPT_OSS, quantization_config=by))
    one = Rope(theta=1.5e5, factor=32.0, trained_length=4096, rounds=False, amplitude=0.1 * math.log(32) + 1)
    assert model.ropes == (one,)
    assert (model.window, model.full_layers, model.quantization) == (128, (1,), method)


def test_the_rotated_share_may_be_given_by_a_number_of_values(tmp_path: Path) -> None:
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
    model = described(checkpoint(tmp_path, model_type="minimax_m2", rotary_dim=8, **sizes))
    assert model.rotated_share == 0.25
