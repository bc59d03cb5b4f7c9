"""The points at which engine and trainer are compared: what modules give that both have, by one name.

    embed_tokens
    layers.0.input                        the residual stream as it enters the layer
    layers.0.input_layernorm
    layers.0.self_attn.q_proj             then k_proj, v_proj, q_norm, k_norm, rotated_q, rotated_k,
                                          attention, o_proj
    layers.0.after_attention              the residual stream with the attention's output
    layers.0.post_attention_layernorm
    layers.0.mlp.gate_proj                then up_proj, activation, down_proj; or gate, experts
    ...
    after_layers, norm, logprobs

Names are those of transformers where it has the module. In layers with norms after attention and feed-forward
part, ``post_attention_layernorm`` is the first of these, and ``after_attention`` what it reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

EMBEDDING, AFTER_LAYERS, FINAL_NORM, LOGPROBS = "embed_tokens", "after_layers", "norm", "logprobs"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class Law(Enum):
    """By what a point's values come about, which decides how far rounding may move them."""

    copy = "copy"  # a row of a table, or a sum of two values
    norm = "norm"
    linear = "linear"
    rotation = "rotation"
    attention = "attention"
    product = "product"  # of an activation and a value
    experts = "experts"


@dataclass(frozen=True, slots=True)
class PointKind:
    """What is known of the points of one name in every layer."""

    law: Law
    source: str = ""  # linear: the point that it reads
    is_divided: bool = False  # tensor-parallel ranks each have some of its values
    by_head: bool = False  # its values are heads, one after the other


_OF_LAYER = {
    "input": PointKind(Law.copy),
    "input_layernorm": PointKind(Law.norm),
    "self_attn.q_proj": PointKind(Law.linear, "input_layernorm", is_divided=True, by_head=True),
    "self_attn.k_proj": PointKind(Law.linear, "input_layernorm", is_divided=True, by_head=True),
    "self_attn.v_proj": PointKind(Law.linear, "input_layernorm", is_divided=True, by_head=True),
    "self_attn.q_a_layernorm": PointKind(Law.norm),
    "self_attn.kv_a_layernorm": PointKind(Law.norm),
    "self_attn.q_norm": PointKind(Law.norm, is_divided=True, by_head=True),
    "self_attn.k_norm": PointKind(Law.norm, is_divided=True, by_head=True),
    "self_attn.rotated_q": PointKind(Law.rotation, is_divided=True, by_head=True),
    "self_attn.rotated_k": PointKind(Law.rotation, is_divided=True, by_head=True),
    "self_attn.attention": PointKind(Law.attention, is_divided=True, by_head=True),
    "self_attn.o_proj": PointKind(Law.linear, "self_attn.attention"),
    "after_attention": PointKind(Law.copy),
    "post_attention_layernorm": PointKind(Law.norm),
    "pre_feedforward_layernorm": PointKind(Law.norm),
    "mlp.gate": PointKind(Law.linear, "post_attention_layernorm"),
    "mlp.gate_proj": PointKind(Law.linear, "post_attention_layernorm", is_divided=True),
    "mlp.up_proj": PointKind(Law.linear, "post_attention_layernorm", is_divided=True),
    "mlp.activation": PointKind(Law.product, is_divided=True),
    "mlp.down_proj": PointKind(Law.linear, "mlp.activation"),
    "mlp.experts": PointKind(Law.experts),
    "post_feedforward_layernorm": PointKind(Law.norm),
}
# How points call what vLLM, transformers or a checkpoint calls otherwise in models of some families.
_USUAL = {"attn.": "self_attn.", "block_sparse_moe.": "mlp.", "mlp.router": "mlp.gate"}
# Linear layers whose output is cut into parts, in their order: in vLLM, and in checkpoints of Phi-3.
PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_OF_MODEL = {
    EMBEDDING: PointKind(Law.copy),
    AFTER_LAYERS: PointKind(Law.copy),
    FINAL_NORM: PointKind(Law.norm),
    LOGPROBS: PointKind(Law.linear, FINAL_NORM),
}
_LAYER_ORDER = list(_OF_LAYER)


@dataclass(frozen=True, slots=True)
class Point:
    """A point by its name, and what is known of it."""

    name: str
    layer: int | None
    kind: PointKind

    @property
    def source(self) -> str:
        """The name of the point that it reads; of a linear one."""
        return self.kind.source if self.layer is None else f"layers.{self.layer}.{self.kind.source}"

    def beside(self, leaf: str) -> str:
        """Return the name of another point of the same layer."""
        return f"layers.{self.layer}.{leaf}"


def point(name: str) -> Point:
    """Return the point of this name. Raises KeyError for a name that is none."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return Point(name, None, _OF_MODEL[name])
    return Point(name, int(match[1]), _OF_LAYER[match[2]])


def usual_leaf(leaf: str) -> str:
    """Return how points call a module of a layer, by its name below the layer."""
    for other, usual in _USUAL.items():
        leaf = leaf.replace(other, usual, 1) if leaf.startswith(other) else leaf
    return leaf


def parts_of(leaf: str) -> list[str]:
    """Return how points call the parts of a layer's output, by the layer's name; [] where it is not cut."""
    prefix, dot, name = leaf.rpartition(".")
    return [prefix + dot + part for part in PARTS.get(name, ())]


def point_of_weight(name: str) -> str | None:
    """Return the point at which a weight is used, by its Hugging Face name; None where it is at none."""
    module = name.removeprefix("model.").rpartition(".")[0]
    if name == "lm_head.weight":
        return LOGPROBS
    if (match := _LAYER.fullmatch(module)) is None:
        return module if module in _OF_MODEL else None
    leaf = usual_leaf(match[2])
    leaf = (parts_of(leaf) or [leaf])[0]
    if leaf.startswith("mlp.experts."):
        leaf = "mlp.experts"
    if name.endswith(".sinks"):
        leaf = "self_attn.attention"
    return f"layers.{match[1]}.{leaf}" if leaf in _OF_LAYER else None


def in_order(names: Iterable[str]) -> list[Point]:
    """Return the points of these names in the order in which a model computes them."""
    return sorted(map(point, names), key=_position)


def _position(one: Point) -> tuple[int, int, int]:
    if one.layer is not None:
        return 1, one.layer, _LAYER_ORDER.index(one.name.split(".", 2)[2])
    order = list(_OF_MODEL).index(one.name)
    return (0, 0, 0) if one.name == EMBEDDING else (2, 0, order)
