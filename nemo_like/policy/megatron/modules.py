"""Norm and attention in plain PyTorch, and the layer specs that use them.

Used wherever Transformer Engine is not installed: on the CPU always, on a GPU without it. They enter
through Megatron-core's own ModuleSpec mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from nemo_like.policy.batch import Packing


class TorchRMSNorm(torch.nn.Module):
    """RMS norm whose weight takes part in sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank norms its own part of the sequence; without this mark Megatron-core would not sum
        # the weight's gradient over them.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.rms_norm(hidden, (hidden.shape[-1],), self.weight, self.eps)


class TorchCoreAttention(MegatronModule):
    """Causal attention with grouped queries by scaled_dot_product_attention."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """query: [T, n, heads, d]; key, value: [T, n, groups, d]. Returns [T, n, heads x d].

        Packed: without n, and each sample by itself. Returns [T, heads, d].
        """
        if packed_seq_params is not None:
            return self._packed(query, key, value, packed_seq_params.lengths)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = self._attend(query, key, value)
        num_samples, num_heads, num_positions, head_size = context.shape
        return context.permute(2, 0, 1, 3).reshape(num_positions, num_samples, num_heads * head_size)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        samples = zip(
            *(tensor.transpose(0, 1).split(lengths, dim=1) for tensor in (query, key, value)), strict=True
        )
        contexts = [self._attend(*(tensor[None] for tensor in sample))[0] for sample in samples]
        return torch.cat(contexts, dim=1).transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """All [n, heads or groups, T, d]."""
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )


@dataclass
class PackedSequences(PackedSeqParams):
    """With the samples' lengths on the host, so that reading them does not wait for the device."""

    lengths: tuple[int, ...] = ()


def packed_sequences(packing: Packing | None) -> PackedSequences | None:
    """What Megatron-core and Transformer Engine ask of packed samples; None for padded ones."""
    if packing is None:
        return None
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_kv=packing.cu_seqlens,
        max_seqlen_q=packing.max_length,
        max_seqlen_kv=packing.max_length,
        lengths=packing.lengths,
    )


def uses_transformer_engine(device: torch.device) -> bool:
    return HAVE_TE and device.type == "cuda"


def layer_spec(config: TransformerConfig, device: torch.device) -> ModuleSpec | TransformerBlockSubmodules:
    """Transformer Engine's layers where they can run, else Megatron-core's with the modules above."""
    if uses_transformer_engine(device):
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=config.qk_layernorm)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    layer.submodules.input_layernorm = TorchRMSNorm
    layer.submodules.pre_mlp_layernorm = TorchRMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TorchCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=TorchRMSNorm
    )
