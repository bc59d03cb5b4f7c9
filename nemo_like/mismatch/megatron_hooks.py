"""Substitutes the engine's values in a Megatron-core model, as the Megatron backend has it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.mismatch.points import AFTER_LAYERS, EMBEDDING, FINAL_NORM
from nemo_like.mismatch.substitution import Substitution

_LAYER = re.compile(r"decoder\.layers\.(\d+)(?:\.(.+))?")
# In layers with norms after attention and MLP, the first has the point of other layers' norm before the MLP.
_PRE_MLP, _AFTER_ATTENTION, _BETWEEN = "pre_mlp_layernorm", "self_attn_bda.norm", "pre_feedforward_layernorm"
_OUTPUTS = {
    "input_layernorm": "input_layernorm",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.q_down_layernorm": "self_attn.q_a_layernorm",
    "self_attention.kv_down_layernorm": "self_attn.kv_a_layernorm",
    "self_attention.core_attention": "self_attn.attention",
    "self_attention.linear_proj": "self_attn.o_proj",
    "mlp.linear_fc2": "mlp.down_proj",
    "mlp_bda.norm": "post_feedforward_layernorm",
    _BETWEEN: _BETWEEN,
}
# None is the layer itself.
_INPUTS = {None: "input", "pre_mlp_layernorm": "after_attention", "mlp.linear_fc2": "mlp.activation"}
_ROTATED = ("self_attn.rotated_q", "self_attn.rotated_k")


@dataclass(frozen=True, slots=True)
class _Replacing:
    """Puts hooks on modules; ``stack`` takes them away."""

    stack: ExitStack
    substitution: Substitution

    def output(self, module: nn.Module, name: str) -> None:
        """Substitute what a module returns."""
        self.changed(module, lambda tensor: self.substitution(name, tensor))

    def changed(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        """Change what a module returns; of a tensor with a bias that is still to be added, their sum."""

        def hook(module: nn.Module, args: Any, output: Any) -> Any:
            if not isinstance(output, tuple):
                return change(output)
            values, bias = output
            return change(values if bias is None else values + bias), None

        self.stack.callback(module.register_forward_hook(hook).remove)

    def inputs(self, module: nn.Module, *names: str) -> None:
        """Substitute the first inputs of a module."""

        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not args:
                return args, {**kwargs, "hidden_states": self.substitution(names[0], kwargs["hidden_states"])}
            replaced = [self.substitution(name, value) for name, value in zip(names, args, strict=False)]
            return (*replaced, *args[len(names) :]), kwargs

        self.stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)


@contextmanager
def substituting(chunks: Iterable[nn.Module], substitution: Substitution) -> Iterator[None]:
    """Have one pipeline stage compute on the engine's values within the block; ``chunks`` are its parts of
    the model."""
    with ExitStack() as stack:
        replacing = _Replacing(stack, substitution)
        for chunk in chunks:
            _substitute(replacing, chunk)
        yield


def _substitute(replacing: _Replacing, chunk: nn.Module) -> None:
    modules = dict(chunk.named_modules())
    norms_later = any(name.endswith(_AFTER_ATTENTION) for name in modules)
    renamed = {_PRE_MLP: _BETWEEN, _AFTER_ATTENTION: _PRE_MLP} if norms_later else {}
    for name, module in modules.items():
        match = _LAYER.fullmatch(name)
        if match is not None:
            _watch(replacing, module, f"layers.{_number(chunk, match[1])}", renamed.get(match[2], match[2]))
        elif name == "embedding":
            replacing.output(module, EMBEDDING)
        elif name == "decoder.final_layernorm":
            replacing.inputs(module, AFTER_LAYERS)
            replacing.output(module, FINAL_NORM)


def _number(model: Any, index: str) -> int:
    """Return the number in the whole model of a layer of this stage; Megatron-core counts from 1."""
    number: int = model.get_submodule(f"decoder.layers.{index}").layer_number
    return number - 1


def _watch(replacing: _Replacing, module: nn.Module, prefix: str, leaf: str | None) -> None:
    if leaf in _INPUTS:
        replacing.inputs(module, f"{prefix}.{_INPUTS[leaf]}")
    if leaf in _OUTPUTS:
        replacing.output(module, f"{prefix}.{_OUTPUTS[leaf]}")
    if leaf == "self_attention.core_attention":
        replacing.inputs(module, *(f"{prefix}.{name}" for name in _ROTATED))
    elif leaf == "self_attention.linear_qkv":
        replacing.changed(module, lambda mixed: _qkv(replacing.substitution, f"{prefix}.self_attn", mixed))
    elif leaf == "mlp.linear_fc1":
        replacing.changed(module, lambda halves: _gate_up(replacing.substitution, f"{prefix}.mlp", halves))
    elif leaf == "mlp.router":
        _watch_router(replacing, module, f"{prefix}.mlp.gate")
    elif leaf == "mlp" and hasattr(module, "router"):
        replacing.output(module, f"{prefix}.mlp.experts")


def _qkv(substitution: Substitution, prefix: str, mixed: Tensor) -> Tensor:
    """Substitute queries, keys and values; each group has its queries, its key and its value one after the
    other."""
    names = [f"{prefix}.{name}_proj" for name in "qkv"]
    widths = [substitution.width(name) for name in names]
    num_groups = substitution.num_groups
    if None in widths:
        return mixed
    sizes = [width // num_groups for width in widths if width is not None]
    parts = mixed.unflatten(-1, (num_groups, -1)).split(sizes, dim=-1)
    replaced = [
        substitution(name, part.flatten(-2)).unflatten(-1, (num_groups, -1))
        for name, part in zip(names, parts, strict=True)
    ]
    return torch.cat(replaced, dim=-1).flatten(-2)


def _gate_up(substitution: Substitution, prefix: str, halves: Tensor) -> Tensor:
    gate, up = halves.chunk(2, dim=-1)
    names = (f"{prefix}.gate_proj", f"{prefix}.up_proj")
    return torch.cat([substitution(name, part) for name, part in zip(names, (gate, up), strict=True)], dim=-1)


def _watch_router(replacing: _Replacing, module: Any, name: str) -> None:
    """Keep the logits of a router, which no module of its own computes."""
    own = module.gating

    def gating(inputs: Tensor) -> Tensor:
        logits: Tensor = own(inputs)
        replacing.substitution(name, logits, replaces=False)
        return logits

    module.gating = gating
    replacing.stack.callback(delattr, module, "gating")
