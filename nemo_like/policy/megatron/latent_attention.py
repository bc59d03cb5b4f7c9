"""Multi-head latent attention (MLA, arXiv 2405.04434) from plain layers, for all devices.

Megatron-core's own wants Transformer Engine: without it, its down projections are cut over tensor-parallel
ranks, and their gradients are wrong. Here every rank has them whole:

    hidden ──▶ q_down ─▶ norm ─▶ q_up ───▶ per head: plain | rotated part of queries
       └─────▶ kv_down ─▶ norm ─▶ kv_up ─▶ per head: plain part of keys | values
                  └─▶ the rotated part of keys, one for all heads

Tensor parallelism comes with sequence parallelism, as in every mixture: a rank has the latents of its own
tokens, the projections to heads gather them, and the ranks' gradients are summed on the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import Attention, SelfAttentionSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.megatron.modules import TorchRMSNorm


class LatentAttention(Attention):
    """Attention whose queries, keys and values are projected from latents. The part of a head that rotates
    comes first, where Megatron-core rotates it."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: Any,
        model: ModelInfo,
        **options: Any,
    ) -> None:
        super().__init__(config, submodules, layer_number, attn_mask_type, "self", **options)
        assert model.latent is not None
        if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            raise ValueError("latent attention with tensor parallelism needs sequence_parallel=true")
        self._sizes, self._amplitude = model.latent, model.ropes[0].amplitude
        sizes, heads = model.latent, model.num_heads
        cut = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        by_rows = {**cut, "gather_output": False, "tp_group": self.tp_group}
        # Attention.forward asks for norms of whole heads, which there are none of.
        self.q_layernorm = self.k_layernorm = None
        if sizes.query_latent is None:
            self.linear_q_proj = submodules.linear_qkv(config.hidden_size, heads * sizes.head, **by_rows)
        else:
            self.linear_q_down_proj = WholeLinear(config, config.hidden_size, sizes.query_latent)
            self.q_down_layernorm = TorchRMSNorm(config, sizes.query_latent, config.layernorm_epsilon)
            self.linear_q_up_proj = submodules.linear_qkv(sizes.query_latent, heads * sizes.head, **by_rows)
        self.linear_kv_down_proj = WholeLinear(config, config.hidden_size, sizes.cached)
        self.kv_down_layernorm = TorchRMSNorm(config, sizes.key_value_latent, config.layernorm_epsilon)
        self.linear_kv_up_proj = submodules.linear_qkv(
            sizes.key_value_latent, heads * (sizes.plain + sizes.value), **by_rows
        )
        # That of the base class is for values as large as queries.
        self.linear_proj = submodules.linear_proj(
            heads * sizes.value,
            config.hidden_size,
            **{**cut, "skip_bias_add": True},
            input_is_parallel=True,
            tp_group=self.tp_group,
        )

    def get_query_key_value_tensors(
        self, hidden_states: Tensor, *_: Any, **options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries and keys [T, n, heads of this rank, rotated + plain], and values [..., value]."""
        sizes = self._sizes
        query = self._queries(hidden_states).unflatten(-1, (-1, sizes.head))
        plain_query, rotated_query = query.split([sizes.plain, sizes.rotated], dim=-1)
        latent, rotated_key = self.linear_kv_down_proj(hidden_states).split(
            [sizes.key_value_latent, sizes.rotated], dim=-1
        )
        up, _ = self.linear_kv_up_proj(self.kv_down_layernorm(latent))
        plain_key, value = up.unflatten(-1, (-1, sizes.plain + sizes.value)).split(
            [sizes.plain, sizes.value], dim=-1
        )
        # Of all ranks' tokens; the backward pass sums the gradients of the ranks' heads.
        rotated_key = gather_from_sequence_parallel_region(rotated_key, group=self.tp_group)
        rotated_key = rotated_key[:, :, None].expand(-1, -1, plain_key.shape[2], -1)
        if self._amplitude != 1.0:  # a rotation is linear, so its amplitude may come before it
            rotated_query, rotated_key = rotated_query * self._amplitude, rotated_key * self._amplitude
        return torch.cat((rotated_query, plain_query), -1), torch.cat((rotated_key, plain_key), -1), value

    def _queries(self, hidden: Tensor) -> Tensor:
        if self._sizes.query_latent is None:
            query, _ = self.linear_q_proj(hidden)
        else:
            query, _ = self.linear_q_up_proj(self.q_down_layernorm(self.linear_q_down_proj(hidden)))
        return query


class WholeLinear(torch.nn.Module):
    """A linear layer of which every tensor-parallel rank has the whole weight. A rank sees a part of the
    tokens, and the mark on the weight has its gradient summed over the ranks."""

    def __init__(self, config: TransformerConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        return functional.linear(hidden, self.weight)
