"""Norm, activation and attention in plain PyTorch, and the layer specs that use them.

They run on the CPU, and on a GPU where Transformer Engine is not installed; the attention also runs where
rows are forests. Megatron-core takes them through its own ModuleSpec mechanism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.nn import functional

from nemo_like.batch.micro_batches import round_up
from nemo_like.policy.backends.devices import on_device
from nemo_like.policy.backends.masked_attention import attend_masked
from nemo_like.policy.backends.varlen import Sequences, attend_varlen, has_varlen_kernel
from nemo_like.policy.batch.context_parts import ContextRank, context_positions
from nemo_like.policy.batch.forest_attention import ForestAttention
from nemo_like.policy.batch.policy_batch import ModelInputs
from nemo_like.policy.megatron.experts import GroupedExperts
from nemo_like.policy.megatron.functions import RMSNormFunction, SwiGLUFunction
from nemo_like.policy.options import Device, Precision, WorkerGroupConfig


class TorchRMSNorm(torch.nn.Module):
    """An RMS norm whose weight takes part in sequence parallelism. In some families it multiplies by 1 more
    than the weight."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps, self._adds_one = eps, config.layernorm_zero_centered_gamma
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Each rank norms its own part of the sequence; without this mark Megatron-core would not sum
        # the weight's gradient over the ranks.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> Tensor:
        if self._adds_one:  # a sum in bfloat16 would lose most of the weight
            return _rms_norm(hidden.float(), 1 + self.weight.float(), self.eps).to(hidden.dtype)
        return _rms_norm(hidden, self.weight, self.eps)


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    if hidden.device.type == "cpu" and hidden.dtype is torch.float32:
        normed: Tensor = RMSNormFunction.apply(hidden, weight, eps)
        return normed
    return functional.rms_norm(hidden, (hidden.shape[-1],), weight, eps)


class TorchSwiGLU(MegatronModule):
    """The activation between the two linear layers of an MLP. It is a MegatronModule because Megatron-core
    asks every module of an MLP for its part of a checkpoint."""

    def forward(self, halves: Tensor) -> Tensor:
        return SwiGLUFunction.apply(halves)


class TorchCoreAttention(MegatronModule):
    """Causal attention with grouped queries by scaled_dot_product_attention.

    Under context parallelism a rank has the keys and values of every rank and the queries of its own
    tokens, two pieces of each sample. In a layer with a sliding window each query attends to its latest keys
    alone. In some families each head has a sink, a logit without a value that every query attends to.
    """

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
        window, windowed = config.window_size, config.window_attn_skip_freq
        has_window = is_layer_window_attention(window, windowed, layer_number)
        self._window = window[0] + 1 if has_window else None
        self.sinks: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            num_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.sinks = torch.nn.Parameter(torch.zeros(num_heads, dtype=config.params_dtype))
        self._context = parallel_state.get_context_parallel_group()

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> ShardedStateDict:
        """Return the sinks as a part of those of all ranks; Megatron-core would take them for copies."""
        state = self.state_dict(keep_vars=True)
        return make_sharded_tensors_for_checkpoint(state, prefix, {"sinks": 0}, sharded_offsets)

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
        """Compute the attention. query: [T, n, heads, d]; key: [T, n, groups, d]; value: [T, n, groups, e].
        Returns [T, n, heads x e]. T counts this rank's tokens.

        In a row of packed samples n is 1, and each sample attends to itself alone, or each token to its path.
        In the format "thd" the arguments are without n, and the result is [T, heads, e].
        """
        if packed_seq_params is not None:
            if packed_seq_params.qkv_format == "thd":
                return self._in_row(query, key, value, packed_seq_params)
            return self._in_row(query[:, 0], key[:, 0], value[:, 0], packed_seq_params).flatten(1)[:, None]
        key, value = self._of_all_ranks(key), self._of_all_ranks(value)
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        context = self._attend(query, key, value)
        num_samples, num_heads, num_positions, head_size = context.shape
        return context.permute(2, 0, 1, 3).reshape(num_positions, num_samples, num_heads * head_size)

    def _in_row(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences | ForestSequences
    ) -> Tensor:
        if isinstance(packed, ForestSequences):
            assert packed.attention is not None
            keys, values = self._of_all_ranks(key), self._of_all_ranks(value)
            return packed.attention.attend(query, keys, values, self.softmax_scale, self._window, self.sinks)
        if has_varlen_kernel(query):
            return self._packed_in_one_kernel(query, key, value, packed)
        return self._packed(query, key, value, packed.lengths)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> Tensor:
        num_ranks = self._context.size()
        lengths = [length // num_ranks for length in lengths if length]
        # [ranks, T, groups, d]: cut into samples first, then each sample's pieces of all ranks are joined.
        key, value = (self._of_all_ranks(tensor).unflatten(0, (num_ranks, -1)) for tensor in (key, value))
        samples = zip(
            query.split(lengths), key.split(lengths, dim=1), value.split(lengths, dim=1), strict=True
        )
        contexts = [
            self._attend(
                queries.transpose(0, 1)[None],
                keys.flatten(0, 1).transpose(0, 1)[None],
                values.flatten(0, 1).transpose(0, 1)[None],
            )[0]
            for queries, keys, values in samples
        ]
        return torch.cat(contexts, dim=1).transpose(0, 1)

    def _packed_in_one_kernel(
        self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences
    ) -> Tensor:
        where, indexes = packed.sequences(self._context.rank(), self._context.size())
        if indexes is not None:
            key, value = (self._of_all_ranks(tensor).index_select(0, indexes) for tensor in (key, value))
        return attend_varlen(query, key, value, where, self.softmax_scale, self._window, self.sinks)

    def _of_all_ranks(self, tensor: Tensor) -> Tensor:
        """Gather the tokens of all context-parallel ranks, [T of all ranks, ...], by rank; the backward pass
        sums the ranks' gradients."""
        if self._context.size() == 1:
            return tensor
        return gather_from_sequence_parallel_region(
            tensor, tensor_parallel_output_grad=True, group=self._context
        )

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Compute causal attention. query: [n, heads, T, d]; key, value: [n, groups, T of all ranks, d]."""
        rank, num_ranks = self._context.rank(), self._context.size()
        if num_ranks == 1:
            return self._attend_to_earlier(query, key, value)
        indexes = _indexes_by_position(key.shape[2], num_ranks).to(key.device)
        key, value = (tensor.index_select(2, indexes) for tensor in (key, value))
        piece = query.shape[2] // 2
        contexts = [
            self._attend_to_earlier(queries, key[:, :, :end], value[:, :, :end])
            for queries, end in zip(
                query.split(piece, dim=2), ((rank + 1) * piece, (2 * num_ranks - rank) * piece), strict=True
            )
        ]
        return torch.cat(contexts, dim=2)

    def _attend_to_earlier(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Have the last query attend to all keys, the query before it to all but the last, and so on.

        Where there are more keys than queries, zeros stand in for the earlier queries. A mask would hide the
        keys as well, but its memory grows with the square of a sample's length. With a window or sinks there
        is one.
        """
        if self._window is not None or self.sinks is not None:
            return attend_masked(query, key, value, self.softmax_scale, self._window, self.sinks)
        if num_earlier := key.shape[2] - query.shape[2]:
            query = functional.pad(query, (0, 0, num_earlier, 0))
        context = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
        return context[:, :, num_earlier:]


class FusedCoreAttention(MegatronModule):
    """Transformer Engine's attention, and TorchCoreAttention for rows that are forests, which it has none
    for."""

    def __init__(self, config: TransformerConfig, **options: Any) -> None:
        super().__init__(config=config)
        self.fused = TESpecProvider().core_attention()(config=config, **options)
        self.of_forests = TorchCoreAttention(config=config, **options)

    def forward(self, *args: Any, packed_seq_params: Any = None, **options: Any) -> Tensor:
        """Compute the attention, as ``TorchCoreAttention`` does."""
        chosen = self.of_forests if isinstance(packed_seq_params, ForestSequences) else self.fused
        context: Tensor = chosen(*args, packed_seq_params=packed_seq_params, **options)
        return context


def _indexes_by_position(num_tokens: int, num_ranks: int) -> Tensor:
    """Return for each position of a sample where its token lies among the tokens of all context-parallel
    ranks, which lie rank by rank, [num_tokens] int64."""
    positions = [context_positions(num_tokens, rank, num_ranks) for rank in range(num_ranks)]
    return torch.cat(positions).argsort()


def context_sequences(lengths: Sequence[int], rank: int, num_ranks: int) -> tuple[Sequences, Tensor]:
    """Return the sequences to which one context-parallel rank's queries of packed samples attend, and their
    keys.

    The rank has two pieces of each sample. Each piece is a sequence of its own, and attends to the sample up
    to the piece's end. The int64 tensor has the positions of all these keys, sequence by sequence, among the
    keys of all ranks, [ranks x tokens of a rank], which lie rank by rank.
    """
    num_tokens = sum(lengths) // num_ranks
    pieces, keys, start = [], [], 0
    for length in filter(None, lengths):
        share = length // num_ranks
        indexes = torch.empty(length, dtype=torch.int64)  # by position in the sample
        for other in range(num_ranks):
            first = other * num_tokens + start
            indexes[context_positions(length, other, num_ranks)] = torch.arange(first, first + share)
        piece = share // 2
        pieces += [piece, piece]
        keys += [indexes[: (rank + 1) * piece], indexes[: (2 * num_ranks - rank) * piece]]
        start += share
    num_keys = torch.tensor([len(indexes) for indexes in keys])
    return Sequences.of(torch.tensor(pieces), num_keys), torch.cat(keys)


@dataclass
class PackedSequences(PackedSeqParams):
    """PackedSeqParams with the samples' lengths on the host too, so that reading them does not wait for the
    device."""

    lengths: tuple[int, ...] = ()
    _sequences: tuple[Sequences, Tensor | None] | None = None

    def sequences(self, rank: int, num_ranks: int) -> tuple[Sequences, Tensor | None]:
        """Return the sequences for ``attend_varlen``, and the positions of their keys among the keys of all
        context-parallel ranks, or None with one rank.

        A model's first layer computes them for all layers.
        """
        if self._sequences is None:
            device = self.cu_seqlens_q.device
            if num_ranks == 1:
                cu, longest = self.cu_seqlens_q, self.max_seqlen_q
                self._sequences = Sequences(cu, cu, longest, longest), None
            else:
                where, indexes = context_sequences(self.lengths, rank, num_ranks)
                self._sequences = on_device(where, device), indexes.to(device, non_blocking=True)
        return self._sequences


@dataclass
class ForestSequences(PackedSeqParams):
    """A row that is a forest. Megatron-core takes it for one long sample and passes it through to
    ``TorchCoreAttention``."""

    attention: ForestAttention | None = None


def packed_parameters(
    inputs: ModelInputs, context: ContextRank, *, rotates_by_length: bool
) -> PackedSequences | ForestSequences | None:
    """Return what Megatron-core and Transformer Engine need to know of a row that is packed or a forest; None
    for padded samples.

    With ``rotates_by_length`` queries and keys are rotated by the samples' lengths (format "thd"). Where no
    fused kernel does that, Megatron-core would read the lengths from the device in every layer. So without
    ``rotates_by_length``, and in a forest, the row is one sample to Megatron-core, and its tokens get the
    rotations of their positions.
    """
    forest, packing = inputs.forest, inputs.packing
    if forest is not None:
        num_slots = inputs.input_ids.shape[1] * context.size
        longest = round_up(forest.longest_path, 2 * context.size)  # Megatron-core cuts it into equal pieces
        return ForestSequences(
            qkv_format="sbhd",
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            attention=ForestAttention(forest, num_slots, context),
        )
    if packing is None:
        return None
    return PackedSequences(
        qkv_format="thd" if rotates_by_length else "sbhd",
        cu_seqlens_q=packing.cu_seqlens,
        cu_seqlens_kv=packing.cu_seqlens,
        max_seqlen_q=packing.max_length,
        max_seqlen_kv=packing.max_length,
        lengths=packing.lengths,
    )


def uses_transformer_engine(device: torch.device) -> bool:
    return HAVE_TE and device.type == "cuda"


def groups_experts(cfg: WorkerGroupConfig, *, is_fused: bool) -> bool:
    """Return whether a mixture's experts compute in one grouped matrix product. With ``is_fused`` the model
    has Transformer Engine's layers.

    Raises ValueError when the configuration asks for it and there is no kernel for it.
    """
    wanted = cfg.megatron_cfg.moe_grouped_gemm
    if cfg.megatron_cfg.expert_tensor_parallel_size > 1 and not is_fused:
        return False  # a part of an expert has no kernel without Transformer Engine
    if cfg.device is Device.cpu:
        return bool(wanted)
    has_kernel = is_fused or cfg.precision is Precision.bfloat16
    if wanted and not has_kernel:
        raise ValueError(
            f"{cfg.label}.megatron_cfg.moe_grouped_gemm=true with {cfg.label}.precision="
            f"{cfg.precision.value} needs Transformer Engine, which is not installed, or has not the layers "
            f"of this model; set {cfg.label}.precision=bfloat16, or the key to null"
        )
    return has_kernel if wanted is None else wanted


def has_fused_layers(config: TransformerConfig) -> bool:
    """Return whether a model has Transformer Engine's layers."""
    fused: bool = config.apply_rope_fusion
    return fused


def layer_spec(config: TransformerConfig, chunk: int | None) -> ModuleSpec | TransformerBlockSubmodules:
    """Return Transformer Engine's layers where the model has them, else Megatron-core's layers with the parts
    of this module, for one ``chunk`` of a stage, or for the whole of it."""
    first = get_transformer_layer_offset(config, chunk)
    num_layers = get_num_layers_to_build(config, chunk)
    have_experts = [bool(one) for one in mixture_layers(config)[first : first + num_layers]]
    if not has_fused_layers(config):
        layers = {one: _plain_layer(config, has_experts=one) for one in set(have_experts)}
        return TransformerBlockSubmodules([layers[one] for one in have_experts], TorchRMSNorm)
    layers = {one: _fused_layer(config, has_experts=one) for one in set(have_experts)}
    if len(layers) == 1:
        return layers[have_experts[0]]
    return TransformerBlockSubmodules([layers[one] for one in have_experts], TESpecProvider().layer_norm())


def mixture_layers(config: TransformerConfig) -> list[int]:
    """Return for each layer of the whole model 1 where it has experts, else 0."""
    if isinstance(config.moe_layer_freq, int):
        return [int(config.num_moe_experts is not None)] * config.num_layers
    return list(config.moe_layer_freq)


def _fused_layer(config: TransformerConfig, *, has_experts: bool) -> ModuleSpec:
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    spec.submodules.self_attention.submodules.core_attention = FusedCoreAttention
    return spec


def _plain_layer(config: TransformerConfig, *, has_experts: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if has_experts else None,
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = TorchRMSNorm
    layer.submodules.pre_mlp_layernorm = TorchRMSNorm
    mlp = layer.submodules.mlp.submodules
    if has_experts:
        mlp.shared_experts.submodules.activation_func = TorchSwiGLU
    if has_experts and config.moe_grouped_gemm:
        mlp.experts = ModuleSpec(module=GroupedExperts)
    else:
        (mlp.experts.submodules if has_experts else mlp).activation_func = TorchSwiGLU
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = TorchCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = TorchRMSNorm
    return layer
