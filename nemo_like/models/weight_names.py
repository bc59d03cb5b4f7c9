"""Says how the weights of Hugging Face checkpoints lie in Megatron-core's GPT model, as plain data.

A rule says for a Megatron parameter which Hugging Face tensors make it up, how they are merged, and how the
merged tensor is cut over tensor-parallel ranks. The tables here have the names that most families share; a
family's file has the others.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum


class Cut(Enum):
    """The ways in which a full tensor is cut over tensor-parallel ranks, an expert over its own."""

    replicated = "replicated"
    rows = "rows"
    columns = "columns"
    gated_rows = "gated_rows"  # [gate; up]: each half is cut by rows


class Merge(Enum):
    """The ways in which the Hugging Face tensors of one parameter are merged."""

    single = "single"
    vocabulary = "vocabulary"  # one tensor, a row per token, padded so that the ranks share it evenly
    stacked = "stacked"  # one below the other
    grouped_qkv = "grouped_qkv"  # per key-value group: its queries, its key, its value
    transposed = "transposed"  # a column per output
    alternating = "alternating"  # transposed, with the outputs of gate and up in turn
    fused_qkv = "fused_qkv"  # grouped_qkv of one tensor that has all queries, then all keys, then all values


@dataclass(frozen=True, slots=True)
class Rule:
    """Which Hugging Face tensors make up a Megatron parameter, how they are merged, and how the merged tensor
    is cut."""

    hf_names: tuple[str, ...]
    cut: Cut = Cut.replicated
    merge: Merge = Merge.single
    is_expert: bool = False


# The name of one expert's part of a tensor that a checkpoint has of all experts of a layer, whose name has no
# number.
EXPERT_OF_STACK = re.compile(r"(?P<layer>.+\.experts)\.(?P<index>\d+)\.(?P<matrix>\w+)")
# The last stage's parameter [vocabulary, H], or [1, H] in a critic's model.
OUTPUT_LAYER = "output_layer.weight"
MODEL_RULES = {
    "embedding.word_embeddings.weight": Rule(("model.embed_tokens.weight",), Cut.rows, Merge.vocabulary),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
    OUTPUT_LAYER: Rule(("lm_head.weight",), Cut.rows, Merge.vocabulary),
}
_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
# The names are below model.layers.INDEX.
LAYER_RULES = {
    "input_layernorm.weight": Rule(("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Rule(tuple(f"{n}.weight" for n in _QKV), Cut.rows, Merge.grouped_qkv),
    "self_attention.linear_qkv.bias": Rule(tuple(f"{n}.bias" for n in _QKV), Cut.rows, Merge.grouped_qkv),
    "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",), Cut.columns),
    "self_attention.q_layernorm.weight": Rule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule(("self_attn.k_norm.weight",)),
    # Latent attention. A latent is whole on every rank, and the queries, keys and values made of it are cut.
    "self_attention.linear_q_proj.weight": Rule(("self_attn.q_proj.weight",), Cut.rows),
    "self_attention.linear_q_down_proj.weight": Rule(("self_attn.q_a_proj.weight",)),
    "self_attention.q_down_layernorm.weight": Rule(("self_attn.q_a_layernorm.weight",)),
    "self_attention.linear_q_up_proj.weight": Rule(("self_attn.q_b_proj.weight",), Cut.rows),
    "self_attention.linear_kv_down_proj.weight": Rule(("self_attn.kv_a_proj_with_mqa.weight",)),
    "self_attention.kv_down_layernorm.weight": Rule(("self_attn.kv_a_layernorm.weight",)),
    "self_attention.linear_kv_up_proj.weight": Rule(("self_attn.kv_b_proj.weight",), Cut.rows),
    "pre_mlp_layernorm.weight": Rule(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": Rule(
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"), Cut.gated_rows, Merge.stacked
    ),
    "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",), Cut.columns),
    # The norms of what attention and feed-forward part add to the residual stream.
    "self_attn_bda.norm.weight": Rule(("post_attention_layernorm.weight",)),
    "mlp_bda.norm.weight": Rule(("post_feedforward_layernorm.weight",)),
    "mlp.router.weight": Rule(("mlp.gate.weight",)),
    "mlp.router.expert_bias": Rule(("mlp.gate.e_score_correction_bias",)),
    "mlp.shared_experts.linear_fc1.weight": Rule(
        ("mlp.shared_experts.gate_proj.weight", "mlp.shared_experts.up_proj.weight"),
        Cut.gated_rows,
        Merge.stacked,
    ),
    "mlp.shared_experts.linear_fc2.weight": Rule(("mlp.shared_experts.down_proj.weight",), Cut.columns),
    # Transformer Engine folds a norm into the linear layer after it.
    "self_attention.linear_qkv.layer_norm_weight": Rule(("input_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": Rule(("post_attention_layernorm.weight",)),
}
# The rules of one expert. The names are below the expert's own place in a layer, such as mlp.experts.INDEX.
EXPERT_RULES = {
    "linear_fc1.weight": Rule(
        ("gate_proj.weight", "up_proj.weight"), Cut.gated_rows, Merge.stacked, is_expert=True
    ),
    "linear_fc2.weight": Rule(("down_proj.weight",), Cut.columns, is_expert=True),
}
