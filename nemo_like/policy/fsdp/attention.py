"""Causal attention for transformers' models, over padded samples or over samples packed end to end.

Models get it through transformers' own registry of attention implementations. It needs no [T, T] mask: the
samples' lengths, which travel down the model as a keyword argument, keep packed samples apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel

from nemo_like.policy.backends.varlen import attend_varlen, has_varlen_kernel
from nemo_like.policy.batch.forest_attention import ForestAttention
from nemo_like.policy.batch.policy_batch import Packing
from nemo_like.policy.fsdp.context_parallel import ContextExchange

ATTENTION_NAME = "nemo_like_causal"
# Options that change which positions attend to which, or how much. An option that is set must not be ignored.
_UNSUPPORTED_OPTIONS = ("sliding_window", "softcap", "s_aux", "position_bias")


def use_causal_attention(model: PreTrainedModel) -> None:
    """Make a model use ``causal_attention``; ``has_plain_attention`` must hold for it."""
    AttentionInterface.register(ATTENTION_NAME, causal_attention)
    # The layers of a vision tower, which are not causal, keep their own attention.
    has_vision_tower = "text_config" in model.config.sub_configs
    model.set_attn_implementation({"text_config": ATTENTION_NAME} if has_vision_tower else ATTENTION_NAME)


def has_plain_attention(model: PreTrainedModel) -> bool:
    """Return whether every layer attends to all earlier positions, and gets its attention from transformers'
    registry."""
    config = model.config.get_text_config()
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        is_full = getattr(config, "sliding_window", None) is None
    else:
        is_full = set(layer_types) == {"full_attention"}
    is_capped = getattr(config, "attn_logit_softcapping", None) is not None
    return bool(model.is_backend_compatible()) and is_full and not is_capped


def causal_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    forest: ForestAttention | None = None,
    context: ContextExchange | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention. query: [n, heads, T, d]; key, value: [n, KV heads, T, d].

    Returns [n, T, heads, d], and None in place of attention weights. With ``packing`` n is 1 and the T tokens
    are the samples end to end. With ``forest`` n is 1 and each token attends to its path. With ``context`` T
    is this rank's share of the tokens, which are exchanged for heads. Raises ValueError for an option that
    plain causal attention does not support.
    """
    unsupported = [name for name in _UNSUPPORTED_OPTIONS if options.get(name) is not None]
    if unsupported:
        raise ValueError(f"{type(module).__name__} asks for {', '.join(unsupported)}: not plain attention")
    if context is not None:
        query, key, value = (context.to_heads(tensor) for tensor in (query, key, value))
    if forest is not None:
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        attended = forest.attend(query, key, value, scaling)[None]
    else:
        attended = _attend_apart(query, key, value, scaling, packing)
    return attended if context is None else context.to_tokens(attended), None


def _attend_apart(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, packing: Packing | None
) -> Tensor:
    """Return the attention of each sample to itself, [n, T, heads, d]."""
    if packing is None:
        attended = _attend(query, key, value, scaling=scaling)
    elif has_varlen_kernel(query):
        query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        return attend_varlen(query, key, value, packing.sequences, scaling)[None]
    else:
        samples = (tensor.split(packing.lengths, dim=2) for tensor in (query, key, value))
        parts = [_attend(*parts, scaling=scaling) for parts in zip(*samples, strict=True)]
        attended = torch.cat(parts, dim=2)
    return attended.transpose(1, 2).contiguous()


def _attend(query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor:
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
    )
