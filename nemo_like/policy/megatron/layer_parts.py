"""The parts of layers that some families have and Megatron-core's own layers have not, for all devices.

``add_parts`` puts them into the specs of layers without Transformer Engine:

    post norms          NormThenAdd      in place of the bias-dropout-add after attention and after the MLP
    whole norms         WholeRMSNorm     of the queries of all heads, and of the keys
    GELU in the gate    TorchGeGLU       between the two linear layers of an MLP
    own rotations       RopeAttention    takes its layer's own of angles_of, which the model computes once
    latents             LatentAttention  in place of attention that projects queries, keys and values at once
    clamped SwiGLU      ClampedSwiGLU    between the two linear layers of an expert
    biases of experts   FreshOutput      the second linear layer of an expert

Sinks are in TorchCoreAttention, and biases of other layers are Megatron-core's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.tensor_parallel.layers import RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from nemo_like.models.family import Part
from nemo_like.models.model_info import ModelInfo
from nemo_like.models.rope import Rope
from nemo_like.policy.megatron.experts import GroupedExperts
from nemo_like.policy.megatron.latent_attention import LatentAttention
from nemo_like.policy.megatron.modules import TorchRMSNorm


def add_parts(layers: TransformerBlockSubmodules, model: ModelInfo, config: TransformerConfig) -> None:
    """Put the parts that this model's family has into the specs of its layers, in place."""
    parts = model.family.parts
    for layer in layers.layer_specs:
        of_layer, attention = layer.submodules, layer.submodules.self_attention
        if Part.post_norms in parts:
            normed = ModuleSpec(module=NormThenAdd, params={"config": config})
            of_layer.self_attn_bda = of_layer.mlp_bda = normed
        if Part.no_pre_norms in parts:
            of_layer.input_layernorm = of_layer.pre_mlp_layernorm = IdentityOp
        if Part.whole_qk_norm in parts:
            heads = {"q_layernorm": model.num_heads, "k_layernorm": model.num_kv_heads}
            for name, num_heads in heads.items():
                whole = ModuleSpec(module=WholeRMSNorm, params={"num_heads": num_heads})
                setattr(attention.submodules, name, whole)
        if Part.gelu_gate in parts:
            of_layer.mlp.submodules.activation_func = TorchGeGLU
        if Part.clamped_swiglu in parts:
            _add_clamped_experts(of_layer.mlp.submodules.experts)
        if not parts.isdisjoint({Part.two_ropes, Part.yarn}):
            attention.module, attention.params["model"] = RopeAttention, model
        if Part.mla in parts:
            attention.module, attention.params["model"] = LatentAttention, model


def _add_clamped_experts(experts: ModuleSpec) -> None:
    if experts.module is GroupedExperts:
        experts.params["activation"] = clamped_swiglu
    else:
        experts.submodules.activation_func = ClampedSwiGLU
        experts.submodules.linear_fc2 = FreshOutput


class NormThenAdd(torch.nn.Module):
    """Norms what attention or an MLP returns, and adds it to the residual stream. Megatron-core asks it first
    for the function that does this. The linear layer before it has no bias, and there is no dropout."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.norm = TorchRMSNorm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        return self._add

    def _add(self, output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        return residual + self.norm(output_and_bias[0])


class WholeRMSNorm(TorchRMSNorm):
    """An RMS norm over all heads of queries, or of keys. Each tensor-parallel rank has some heads, and the
    weights of these."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, *, num_heads: int
    ) -> None:
        num_ranks = config.tensor_model_parallel_size
        super().__init__(config, num_heads // num_ranks * hidden_size, eps)
        self._num_ranks = num_ranks
        # Of its weights a rank sees all tokens, so their gradient needs no sum over the ranks.
        self.weight.sequence_parallel = False

    def forward(self, heads: Tensor) -> Tensor:
        """Norm [T, n, heads of this rank, d]."""
        values = heads.flatten(2).float()
        mean_square = values.square().mean(-1, keepdim=True)
        if self._num_ranks > 1:
            # Every rank's heads depend on the sum, so its gradient is summed over the ranks as well.
            total = copy_to_tensor_model_parallel_region(
                reduce_from_tensor_model_parallel_region(mean_square)
            )
            mean_square = total / self._num_ranks
        normed = values * torch.rsqrt(mean_square + self.eps) * self.weight
        return normed.to(heads.dtype).view_as(heads)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the weight as a part of that of all ranks; Megatron-core takes other norms for copies."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"weight": 0}, sharded_offsets)


class RopeAttention(SelfAttention):
    """Attention that rotates queries and keys in the family's own way: as all layers do, or where there are
    two rotations as layers with a window do, or as layers without one."""

    def __init__(self, *args: Any, model: ModelInfo, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_ropes = len(model.ropes)
        self._index = int(self._num_ropes > 1 and self.layer_number - 1 in model.full_layers)
        self._amplitude = model.ropes[self._index].amplitude

    def get_query_key_value_tensors(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().get_query_key_value_tensors(*args, **options)
        if self._amplitude == 1.0:
            return query, key, value
        # A rotation is linear, so its amplitude may come before it.
        return query * self._amplitude, key * self._amplitude, value

    def forward(
        self, hidden_states: Tensor, *args: Any, rotary_pos_emb: Tensor, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        # The angles of all rotations are there twice, for both halves of a head.
        angles = rotary_pos_emb.unflatten(-1, (2, self._num_ropes, -1))[..., self._index, :].flatten(-2)
        outputs: tuple[Tensor, Tensor | None] = super().forward(
            hidden_states, *args, rotary_pos_emb=angles, **options
        )
        return outputs


class TorchGeGLU(MegatronModule):
    """The gated activation by GELU's approximation with tanh. Megatron-core asks every module of an MLP for
    its part of a checkpoint."""

    def forward(self, halves: Tensor) -> Tensor:
        gate, linear = halves.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * linear


def clamped_swiglu(halves: Tensor) -> Tensor:
    """Compute (b + 1) a sigmoid(1.702 a) of the halves a and b, after a is held below 7 and b within 7, as
    gpt-oss does. halves: [..., 2 f]. Returns [..., f]. For the backward pass the halves alone are kept."""
    return checkpoint(_clamped_swiglu, halves, use_reentrant=False, preserve_rng_state=False)


def _clamped_swiglu(halves: Tensor) -> Tensor:
    gate, linear = halves.chunk(2, dim=-1)
    gate, linear = gate.clamp(max=7.0), linear.clamp(-7.0, 7.0)
    return (linear + 1) * gate * torch.sigmoid(1.702 * gate)


class ClampedSwiGLU(MegatronModule):
    """``clamped_swiglu`` as a module, of which Megatron-core asks its part of a checkpoint."""

    def forward(self, halves: Tensor) -> Tensor:
        return clamped_swiglu(halves)


class FreshOutput(RowParallelLinear):
    """A linear layer whose output is a tensor of its own: Megatron-core adds an expert's bias to it in place,
    which autograd refuses for a view."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        output, bias = super().forward(hidden)
        return output.clone(), bias


def embedding_scale(model: ModelInfo, dtype: torch.dtype) -> float:
    """Return the factor of a model's embeddings, rounded as transformers and vLLM round it."""
    if Part.scaled_embeddings not in model.family.parts:
        return 1.0
    return torch.tensor(model.hidden_size**0.5, dtype=dtype).item()


def angles_of(ropes: Sequence[Rope], size: int) -> Tensor:
    """Return the angles by which the pairs of the ``size`` values of a head that rotate turn a token, one
    rotation after the other, [rotations x size / 2] float32."""
    return torch.cat([_angles(rope, size) for rope in ropes])


def _angles(rope: Rope, size: int) -> Tensor:
    powers = rope.theta ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    plain, divided = 1.0 / powers, 1.0 / (rope.factor * powers)
    if rope.trained_length is None:
        return divided
    first, last = (
        size * math.log(rope.trained_length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))
        for turns in (rope.beta_fast, rope.beta_slow)
    )
    if rope.rounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first or 0.001
    share = ((torch.arange(size // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    kept = 1 - share
    return divided * (1 - kept) + plain * kept
