"""Substitutes the engine's values in a transformers model, as the FSDP backend has it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from nemo_like.mismatch.points import AFTER_LAYERS, EMBEDDING, FINAL_NORM, parts_of, usual_leaf
from nemo_like.mismatch.substitution import Substitution
from nemo_like.policy.fsdp.attention import ATTENTION_NAME, causal_attention

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)(?:\.(.+))?")
# Modules whose output is a point of the same name.
_OUTPUTS = {
    *("input_layernorm", "post_attention_layernorm"),
    *("pre_feedforward_layernorm", "post_feedforward_layernorm"),
    *(f"self_attn.{name}_{kind}" for name in "qk" for kind in ("proj", "norm")),
    *("self_attn.v_proj", "self_attn.o_proj", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.experts"),
}
# Modules whose input is a point; None is the layer itself.
_INPUTS = {None: "input", "post_attention_layernorm": "after_attention", "mlp.down_proj": "mlp.activation"}
_ROUTER = "mlp.gate"  # returns its logits first, and then what it chose by them


@contextmanager
def substituting(model: nn.Module, substitution: Substitution) -> Iterator[None]:
    """Have the model compute on the engine's values within the block."""
    with ExitStack() as stack:
        layers: dict[int, str] = {}
        for name, module in model.named_modules():
            match = _LAYER.fullmatch(name)
            if match is not None:
                leaf = match[2] and usual_leaf(match[2])
                _watch_layer(stack, module, f"layers.{match[1]}", leaf, substitution)
                if match[2] == "self_attn":
                    layers[id(module)] = f"layers.{match[1]}.self_attn"
            elif name.rpartition(".")[2] == EMBEDDING:
                _replace_output(stack, module, EMBEDDING, substitution)
            elif name.rpartition(".")[2] == "norm":
                _replace_input(stack, module, AFTER_LAYERS, substitution)
                _replace_output(stack, module, FINAL_NORM, substitution)
        stack.enter_context(_attention(layers, substitution))
        yield


def _watch_layer(
    stack: ExitStack, module: nn.Module, prefix: str, leaf: str | None, substitution: Substitution
) -> None:
    if leaf in _INPUTS:
        _replace_input(stack, module, f"{prefix}.{_INPUTS[leaf]}", substitution)
    if leaf in _OUTPUTS:
        _replace_output(stack, module, f"{prefix}.{leaf}", substitution)
    if leaf and (parts := parts_of(leaf)):
        _replace_parts(stack, module, [f"{prefix}.{name}" for name in parts], substitution)
    if leaf == _ROUTER:

        def see(module: nn.Module, args: Any, output: Any) -> None:
            logits = output[0] if isinstance(output, tuple) else output
            substitution(f"{prefix}.{_ROUTER}", logits, replaces=False)

        stack.callback(module.register_forward_hook(see).remove)


def _replace_output(stack: ExitStack, module: nn.Module, name: str, substitution: Substitution) -> None:
    def replaced(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return substitution(name, output)

    stack.callback(module.register_forward_hook(replaced).remove)


def _replace_parts(
    stack: ExitStack, module: nn.Module, names: Sequence[str], substitution: Substitution
) -> None:
    """Substitute the parts into which a module's output is cut, in the order of their names."""

    def replaced(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        widths = [substitution.width(name) or 0 for name in names]
        if sum(widths) != output.shape[-1]:
            return output
        parts = output.split(widths, dim=-1)
        return torch.cat([substitution(name, part) for name, part in zip(names, parts, strict=True)], dim=-1)

    stack.callback(module.register_forward_hook(replaced).remove)


def _replace_input(stack: ExitStack, module: nn.Module, name: str, substitution: Substitution) -> None:
    def replaced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (substitution(name, args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": substitution(name, kwargs["hidden_states"])}

    stack.callback(module.register_forward_pre_hook(replaced, with_kwargs=True).remove)


@contextmanager
def _attention(layers: dict[int, str], substitution: Substitution) -> Iterator[None]:
    """Substitute what ``causal_attention`` gets and returns; transformers finds it in its registry."""

    def substituted(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        prefix = layers[id(module)]
        query = _by_token(substitution, f"{prefix}.rotated_q", query)
        key = _by_token(substitution, f"{prefix}.rotated_k", key)
        context, weights = causal_attention(module, query, key, value, *args, **kwargs)
        return substitution(f"{prefix}.attention", context), weights

    AttentionInterface.register(ATTENTION_NAME, substituted)
    try:
        yield
    finally:
        AttentionInterface.register(ATTENTION_NAME, causal_attention)


def _by_token(substitution: Substitution, name: str, values: Tensor) -> Tensor:
    """Substitute values that lie head by head, [1, heads, T, head size]."""
    return substitution(name, values.transpose(1, 2).contiguous()).transpose(1, 2)
