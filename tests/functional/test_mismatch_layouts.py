"""Layouts and models in which the search must name no module, and faults of their own in some of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from nemo_like.mismatch.search import NOTHING
from tests.functional.generation_fixtures import make_checkpoint
from tests.functional.mismatch_pairs import Pair, config, parties_of, planted, points
from tests.functional.policy_fixtures import make_checkpoint as make_family

pytestmark = [pytest.mark.timeout(600), pytest.mark.engine]


def test_a_bias_that_one_head_lacks_is_named(tmp_path: Path) -> None:
    cfg = config(_with_biases(tmp_path / "model"))
    with parties_of(cfg, tmp_path) as parties:
        pair = Pair(cfg, parties)
        assert pair.find().sentences == [NOTHING]
        with planted(pair, "bias_of_head_1", "model.layers.0.self_attn.qkv_proj"):
            found = pair.find()
    assert found.sentences == [
        "layers.0.self_attn.q_proj: the engine has another weight (model.layers.0.self_attn.q_proj.bias) "
        "than the trainer"
    ]
    assert [one.heads for one in found.compared.findings] == [(1,)]


def test_an_expert_that_is_loaded_transposed_is_named(tmp_path: Path) -> None:
    cfg = config(make_checkpoint(tmp_path / "model", tied=False, num_experts=4, expert_size=64))
    with parties_of(cfg, tmp_path) as parties:
        pair = Pair(cfg, parties)
        assert pair.find().sentences == [NOTHING]
        with planted(pair, "transpose", "model.layers.1.mlp.experts.2.down_proj.weight"):
            pair.push()
            found = pair.find()
        assert found.sentences == ["layers.1.mlp.experts: weights are equal, experts differs in expert 2"]
        with planted(pair, "exchange", "model.layers.0.mlp.experts.{}.down_proj.weight"):
            pair.push()
            found = pair.find()
        assert found.sentences == ["layers.0.mlp.experts: weights are equal, experts differs in experts 1, 2"]
        pair.push()
        assert pair.find().sentences == [NOTHING]


def test_an_adapter_whose_scale_differs_is_named(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", tied=True)
    cfg = config(model, "policy=fsdp_lora", f"policy.model_name='{model}'", "policy.optimizer.lr=1e-2")
    with parties_of(cfg, tmp_path) as parties:
        pair = Pair(cfg, parties)
        pair.train()  # an adapter's second matrix begins with zeros
        pair.push()
        assert pair.find().sentences == [NOTHING]
        pair.parties.ask_trainer("double_scaling", "model.layers.1.self_attn.q_proj")
        assert points(pair.find()) == ["layers.1.self_attn.q_proj"]


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_an_adapter_of_experts_whose_scale_differs_is_named(backend: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", tied=True, num_experts=4, expert_size=64)
    named = "policy.lora.target_modules=[q_proj, gate_proj, up_proj, down_proj]"
    own = [f"policy={backend}_lora", f"policy.model_name='{model}'", "policy.optimizer.lr=1e-2", named]
    cfg = config(model, *own)
    with parties_of(cfg, tmp_path) as parties:
        pair = Pair(cfg, parties)
        pair.train()
        pair.push()
        assert pair.find().sentences == [NOTHING]
        if backend == "fsdp":
            pair.parties.ask_trainer("double_scaling", "model.layers.1.mlp.experts")
            assert points(pair.find()) == ["layers.1.mlp.experts"]


_MEGATRON = "policy.megatron_cfg"


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{_MEGATRON}.tensor_model_parallel_size=2", f"{_MEGATRON}.sequence_parallel=true"],
        [
            f"{_MEGATRON}.pipeline_model_parallel_size=2",
            "policy.sequence_packing.enabled=false",
            "generation.vllm_cfg.tensor_parallel_size=2",
        ],
        ["policy.backend=fsdp", "policy.fsdp_cfg.tensor_parallel_size=2", "policy.precision=bfloat16"],
    ],
    ids=["tp 2 with sequences divided", "pp 2, and an engine of two workers", "fsdp, tp 2, bfloat16"],
)
def test_a_healthy_layout_differs_by_rounding_alone(overrides: list[str], tmp_path: Path) -> None:
    cfg = config(make_checkpoint(tmp_path / "model", tied=False), *overrides)
    with parties_of(cfg, tmp_path) as parties:
        pair = Pair(cfg, parties)
        assert pair.find().sentences == [NOTHING]
        pair.train()
        pair.push()
        found = pair.find()
    assert found.sentences == [NOTHING]
    assert set(found.compared.excess) >= _EVERYWHERE
    assert len(found.compared.excess) == 4 + 2 * 17


def test_a_family_with_parts_of_its_own_differs_by_rounding_alone(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32}
    cfg = config(make_family(tmp_path / "model", "gemma3_text", **sizes))
    with parties_of(cfg, tmp_path) as parties:
        found = Pair(cfg, parties).find()
    assert found.sentences == [NOTHING]
    assert set(found.compared.excess) >= {
        *("after_layers", "norm", "logprobs"),
        *(f"layers.1.{name}" for name in ("after_attention", "post_attention_layernorm", "mlp.down_proj")),
        *(f"layers.1.self_attn.{name}" for name in ("q_norm", "rotated_k", "attention", "o_proj")),
    }


# Of the points of both layers.
_EVERYWHERE = {
    *("embed_tokens", "after_layers", "norm", "logprobs"),
    *(f"layers.1.{name}" for name in ("input", "after_attention", "mlp.gate_proj", "mlp.down_proj")),
    *(f"layers.0.self_attn.{name}" for name in ("q_proj", "v_proj", "rotated_k", "attention", "o_proj")),
}


def _with_biases(path: Path) -> Path:
    """Qwen2, whose queries, keys and values have biases."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(
        Qwen2Config(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            initializer_range=0.15,
            tie_word_embeddings=False,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
    model.save_pretrained(path)
    return path
