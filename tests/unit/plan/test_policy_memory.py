"""Bytes worked out by hand for a model of 2 layers: hidden 8, 2 heads of 4, 1 KV head, FFN 16, vocabulary 32.

A layer has 8 x (8 + 8) + 8 x 2 x 4 = 192 scalars of attention and 8 of its norms (Qwen3), 3 x 8 x 16 = 384
of FFN and 16 of norms: 600. With embedding and output layer of 256 each and the last norm of 8: 1720.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.configuration import load_config
from nemo_like.models.model_info import ModelInfo, model_of, read_model_info
from nemo_like.plan.policy_memory import PolicyMemory, layer_bytes, policy_memory
from tests.unit.config.checkpoints import DEMO

MEGATRON = "policy.megatron_cfg"
CHUNKS = f"{MEGATRON}.virtual_pipeline_model_parallel_size"
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 8,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 2,
    "vocab_size": 32,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
MIXTURE = {
    **SHAPE,
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LOGIT_CHUNK = 1 << 28

Memory = Callable[..., PolicyMemory]


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    def of(*overrides: str, shape: dict = SHAPE, rank: int = 0) -> PolicyMemory:
        (tmp_path / "config.json").write_text(json.dumps(shape))
        model: ModelInfo = read_model_info(str(tmp_path), "megatron")
        cfg = load_config(DEMO, [f"policy.model_name={tmp_path}", "policy.data_parallel_size=1", *overrides])
        return policy_memory(cfg.policy, model, rank)

    return of


def test_one_rank_in_float32_has_weights_gradients_and_two_moments(memory: Memory) -> None:
    one = memory()
    assert (one.weights, one.gradients, one.optimizer) == (4 * 1720, 4 * 1720, 8 * 1720)


def test_bfloat16_has_master_weights_besides(memory: Memory) -> None:
    one = memory("policy.precision=bfloat16")
    assert (one.weights, one.gradients, one.optimizer) == (2 * 1720, 4 * 1720, 12 * 1720)


def test_muon_has_one_momentum_of_each_matrix_and_no_two(memory: Memory) -> None:
    # A layer: 600 without its two norms of 8; two moments of embedding, output layer and five norms.
    one = memory("policy.optimizer.kind=muon")
    assert one.optimizer == 4 * (2 * 584) + 8 * (2 * 256 + 5 * 8)
    assert one.stored == 4 * 1720 + one.optimizer
    in_bfloat16 = memory("policy.optimizer.kind=muon", "policy.precision=bfloat16")
    assert in_bfloat16.optimizer == 4 * 1720 + one.optimizer


def test_muon_has_one_momentum_of_each_expert_on_every_rank_that_has_it(memory: Memory) -> None:
    layout = ("policy.data_parallel_size=2", f"{MEGATRON}.expert_model_parallel_size=2")
    adam, muon = (memory(*layout, *more, shape=MIXTURE) for more in ((), ("policy.optimizer.kind=muon",)))
    # A layer's matrices beside experts: 248 less 16 of norms; half of four experts of 384.
    assert adam.optimizer - muon.optimizer == adam.stored - muon.stored == 4 * 2 * (232 + 768)


def test_pipeline_stages_hold_their_layers_and_the_ends_of_the_model(memory: Memory) -> None:
    two = f"{MEGATRON}.pipeline_model_parallel_size=2"
    assert memory(two, rank=0).weights == 4 * (600 + 256)
    assert memory(two, rank=1).weights == 4 * (600 + 256 + 8)
    tied = {**SHAPE, "tie_word_embeddings": True}
    assert memory(two, rank=1, shape=tied).weights == 4 * (600 + 256 + 8)  # a copy of the embedding


def test_chunks_of_a_stage_have_more_forwards_in_flight_of_fewer_layers(memory: Memory) -> None:
    shape = {**SHAPE, "num_hidden_layers": 8}
    two = f"{MEGATRON}.pipeline_model_parallel_size=2"
    whole, chunked = (memory(two, *more, shape=shape) for more in ((), (f"{CHUNKS}=2",)))
    assert chunked.weights == whole.weights
    output = 3 * LOGIT_CHUNK + 4 * 32 * 8
    # Two forwards of four layers; 2 x (2 - 1) + (2 - 1) x 2 + 1 = 5 forwards of two.
    assert (chunked.training_activations - output) * 8 == (whole.training_activations - output) * 10


def test_the_distributed_optimizer_is_spread_over_data_and_context_parallel_ranks(memory: Memory) -> None:
    spread = (
        "policy.data_parallel_size=4",
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{MEGATRON}.use_distributed_optimizer=true",
    )
    assert memory(*spread).optimizer == 8 * (860 // 4)
    assert memory(*spread).gradients == 4 * 860


def test_an_optimizer_on_the_host_has_gradients_beside_masters_and_moments(memory: Memory) -> None:
    sharded = (f"{MEGATRON}.use_distributed_optimizer=true", "policy.precision=bfloat16")
    on_gpu = memory("policy.data_parallel_size=4", *sharded)
    one = memory("policy.data_parallel_size=4", *sharded, f"{MEGATRON}.optimizer_cpu_offload=true")
    assert (one.weights, one.gradients, one.optimizer) == (2 * 1720, 4 * 1720, 0)
    assert one.on_host == (12 + 4) * 430
    assert (on_gpu.optimizer, on_gpu.on_host) == (12 * 430, 0)
    assert (one.stored, one.gathered) == (on_gpu.stored, on_gpu.gathered)


def test_experts_are_divided_over_expert_parallel_ranks_alone(memory: Memory) -> None:
    # A layer: 192 + 8 + 16 + a router of 4 x 8 = 248, and 4 experts of 384.
    layout = ("policy.data_parallel_size=2", f"{MEGATRON}.tensor_model_parallel_size=2")
    held = memory(*layout, f"{MEGATRON}.expert_model_parallel_size=4", shape=MIXTURE)
    assert held.weights == 4 * ((2 * 248 + 2 * 256 + 8) // 2 + 2 * 384)


def test_fsdp_divides_everything_and_gathers_two_layers_and_the_embedding(memory: Memory) -> None:
    fsdp = ("policy.backend=fsdp", "policy.data_parallel_size=4", "policy.precision=bfloat16")
    one = memory(*fsdp)
    assert (one.weights, one.gradients, one.optimizer) == (4 * 430, 4 * 430, 8 * 430)
    offloaded = memory(*fsdp, "policy.fsdp_cfg.cpu_offload=true")
    assert (offloaded.weights, offloaded.gradients, offloaded.optimizer) == (0, 0, 0)
    assert offloaded.logprob_activations == one.logprob_activations
    whole = memory(*fsdp, "policy.fsdp_cfg.reduce_gradients_once=true")
    assert whole.training_activations == one.training_activations + 4 * 4 * 430


def test_adapters_alone_have_gradients_and_moments(memory: Memory) -> None:
    lora = ("policy.lora.enabled=true", "policy.lora.rank=2", "policy.lora.target_modules=[q_proj]")
    adapters = 2 * 2 * (8 + 8)  # layers x rank x (inputs + outputs)
    one = memory(*lora, "policy.precision=bfloat16")
    assert (one.gradients, one.optimizer) == (4 * adapters, 8 * adapters)
    assert one.weights == 2 * 1720 + 4 * adapters


def test_recomputation_keeps_a_layers_input_instead_of_its_activations(memory: Memory) -> None:
    fixed = (
        *("policy.sequence_packing.enabled=false", "policy.train_micro_batch_size=2"),
        *("policy.max_total_sequence_length=32", "policy.precision=bfloat16"),
    )
    # Per token: 4 x 8 of hidden states, 3 x 8 of queries and 2 x 8 of keys and values (normalised), 4 x 16.
    layer = 64 * 2 * (32 + 24 + 16 + 64)
    rest = 3 * LOGIT_CHUNK + 4 * 32 * 8
    assert memory(*fixed).training_activations == 2 * layer + rest
    recomputed = memory(*fixed, f"{MEGATRON}.activation_checkpointing=true")
    assert recomputed.training_activations == 2 * 64 * 2 * 8 + layer + rest


def test_further_norms_of_a_layer_have_inputs_and_outputs_as_well(memory: Memory) -> None:
    fixed = ("policy.max_total_sequence_length=32", "policy.sequence_packing.enabled=false")
    size = "policy.train_micro_batch_size=2"
    gemma, qwen3 = (
        memory(*fixed, size, shape={**SHAPE, "model_type": kind}) for kind in ("gemma3_text", "qwen3")
    )
    assert gemma.weights == 4 * (1720 + 2 * 2 * 8)  # in each of two layers two more norms of 8
    # In float32: 64 tokens, two layers, 2 x 8 values for each of these norms.
    assert gemma.training_activations - qwen3.training_activations == 4 * 64 * 2 * 2 * 2 * 8


def test_a_teacher_has_no_gradients_and_no_optimizer_and_its_weights_in_its_own_precision(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    model = read_model_info(str(tmp_path), "megatron")
    given = ["teacher=default", f"teacher.model_name={tmp_path}", "teacher.precision=bfloat16"]
    for backend in ("megatron", "fsdp"):
        cfg = load_config(DEMO, [f"policy.model_name={tmp_path}", f"teacher.backend={backend}", *given])
        assert cfg.teacher is not None
        one = policy_memory(replace(cfg.teacher, data_parallel_size=1), model, rank=0)
        assert (one.weights, one.gradients, one.optimizer) == (2 * 1720, 0, 0)


def test_under_adapters_fsdp_keeps_the_frozen_weights_in_the_policys_precision(memory: Memory) -> None:
    lora = ("policy.lora.enabled=true", "policy.lora.rank=2", "policy.lora.target_modules=[q_proj]")
    one = memory(*lora, "policy.backend=fsdp", "policy.precision=bfloat16")
    adapters = 2 * 2 * (8 + 8)  # 2 layers, rank 2, from 8 to 2 heads of 4
    assert one.weights == 2 * 1720 + 4 * adapters
    assert (one.gradients, one.optimizer) == (4 * adapters, 8 * adapters)


EXPERT_ADAPTERS = (
    *("policy.lora.enabled=true", "policy.lora.rank=2", "policy.precision=bfloat16"),
    "policy.lora.target_modules=[q_proj,gate_proj,up_proj,down_proj]",
)


def test_experts_adapters_are_divided_over_the_ranks_that_share_the_experts(memory: Memory) -> None:
    attention = 2 * 2 * (8 + 8)  # layers x rank x (inputs + outputs)
    experts = 2 * 4 * 2 * (8 + 2 * 16 + 16 + 8)  # layers x experts x rank x (gate and up, down)
    one = memory(*EXPERT_ADAPTERS, shape=MIXTURE)
    assert (one.gradients, one.optimizer) == (4 * (attention + experts), 8 * (attention + experts))
    half = ("policy.data_parallel_size=2", f"{MEGATRON}.expert_model_parallel_size=2")
    two = memory(*EXPERT_ADAPTERS, *half, shape=MIXTURE)
    assert two.gradients == 4 * (attention + experts // 2)


def test_fsdp_holds_experts_merged_with_their_adapters_until_the_backward_pass(memory: Memory) -> None:
    fsdp, attention_alone = "policy.backend=fsdp", "policy.lora.target_modules=[q_proj]"
    own, beside = (
        memory(*EXPERT_ADAPTERS, fsdp, *more, shape=MIXTURE).training_activations
        for more in ((), (attention_alone,))
    )
    assert own - beside == 2 * 2 * 4 * 3 * 8 * 16  # bytes, layers, experts, matrices
    recomputed = (fsdp, "policy.fsdp_cfg.activation_checkpointing=true")
    own, beside = (
        memory(*EXPERT_ADAPTERS, *recomputed, *more, shape=MIXTURE).training_activations
        for more in (("policy.lora.target_modules=[down_proj]",), (attention_alone,))
    )
    assert own - beside == 2 * 4 * 8 * 16  # of one layer, and of the three matrices one


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_critic_has_a_head_in_the_place_of_the_output_layer_and_no_logits(
    tmp_path: Path, is_tied: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**SHAPE, "tie_word_embeddings": is_tied}))
    critic = ("value=default", "grpo.adv_estimator.name=gae", "policy.data_parallel_size=1")
    cfg = load_config(DEMO, [f"policy.model_name={tmp_path}", *critic])
    assert cfg.value is not None
    language_model, of_critic = model_of(cfg.policy), model_of(cfg.value)
    one, other = policy_memory(cfg.value, of_critic, 0), policy_memory(cfg.value, language_model, 0)
    assert of_critic.num_parameters == 1720 - 32 * 8 + 8  # without the output layer, with the head
    assert one.weights == 4 * (1720 - 32 * 8 + 8)
    assert other.logprob_activations - one.logprob_activations == 2 * LOGIT_CHUNK
    assert other.training_activations - one.training_activations == 3 * LOGIT_CHUNK + 4 * 32 * 8


def test_latent_attention_keeps_copies_of_queries_and_keys_and_its_latents(tmp_path: Path) -> None:
    """2 heads of 3 + 1 and values of 2: queries of 8, keys and values of 12; latents of 5 and 2."""
    sizes = {
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 1,
        "v_head_dim": 2,
        "kv_lora_rank": 2,
        "q_lora_rank": 5,
    }
    experts = {"n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 1, "num_experts_per_tok": 2}
    content = {**SHAPE, **sizes, **experts, "model_type": "deepseek_v3"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    model = read_model_info(str(tmp_path), "megatron")
    attention, latents, norms = 3 * 8 + 2 * 12, 2 * (5 + 2), 4 * 8
    experts_of_token, shared = 2 * (4 * 16 + 2 * 8), 4 * 16
    values = attention + latents + norms + experts_of_token + shared
    assert layer_bytes(model, 10, value_bytes=2, tp=1) == 10 * 2 * values
    divided = attention // 2 + (latents + norms + experts_of_token + shared) // 2
    assert layer_bytes(model, 10, value_bytes=2, tp=2, sequence_parts=2) == 10 * 2 * divided
