"""Converts weights between Hugging Face checkpoints and Megatron-core's GPT model: Llama, Qwen2, Qwen3,
Qwen3-MoE.

A table of rules says for each Megatron parameter which Hugging Face tensors make it up, how they are merged,
and how the merged tensor is cut over tensor-parallel ranks. An expert of a mixture is never cut: each
expert-parallel rank holds some experts whole. Loading reads one parameter at a time, so a whole model is
never in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn import functional

from nemo_like.cluster.coordinates import Coordinates
from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.backends.hf_checkpoint import HFCheckpoint

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(?P<index>\d+)\.(?P<layer>linear_fc[12])\.weight")
# Transformer Engine's grouped layers number their weights.
_TE_EXPERT = re.compile(r"mlp\.experts\.(?P<layer>linear_fc[12])\.weight(?P<index>\d+)")
_GROUPED_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.weight([12])")


class Cut(Enum):
    """The ways in which a full tensor is cut over tensor-parallel ranks."""

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


@dataclass(frozen=True, slots=True)
class Rule:
    """Which Hugging Face tensors make up a Megatron parameter, how they are merged, and how the merged tensor
    is cut."""

    hf_names: tuple[str, ...]
    cut: Cut = Cut.replicated
    merge: Merge = Merge.single
    is_expert: bool = False


_MODEL_RULES = {
    "embedding.word_embeddings.weight": Rule(("model.embed_tokens.weight",), Cut.rows, Merge.vocabulary),
    "decoder.final_layernorm.weight": Rule(("model.norm.weight",)),
    "output_layer.weight": Rule(("lm_head.weight",), Cut.rows, Merge.vocabulary),
}
_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")
_LAYER_RULES = {
    "input_layernorm.weight": Rule(("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": Rule(tuple(f"{n}.weight" for n in _QKV), Cut.rows, Merge.grouped_qkv),
    "self_attention.linear_qkv.bias": Rule(tuple(f"{n}.bias" for n in _QKV), Cut.rows, Merge.grouped_qkv),
    "self_attention.linear_proj.weight": Rule(("self_attn.o_proj.weight",), Cut.columns),
    "self_attention.q_layernorm.weight": Rule(("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule(("self_attn.k_norm.weight",)),
    "pre_mlp_layernorm.weight": Rule(("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": Rule(
        ("mlp.gate_proj.weight", "mlp.up_proj.weight"), Cut.gated_rows, Merge.stacked
    ),
    "mlp.linear_fc2.weight": Rule(("mlp.down_proj.weight",), Cut.columns),
    "mlp.router.weight": Rule(("mlp.gate.weight",)),
    # Transformer Engine folds a norm into the linear layer after it.
    "self_attention.linear_qkv.layer_norm_weight": Rule(("input_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": Rule(("post_attention_layernorm.weight",)),
}
# The rules of one expert; its Hugging Face tensors are under mlp.experts.INDEX.
_EXPERT_RULES = {
    "linear_fc1": Rule(("gate_proj.weight", "up_proj.weight"), merge=Merge.stacked, is_expert=True),
    "linear_fc2": Rule(("down_proj.weight",), is_expert=True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The part of the model that one rank holds: a pipeline stage's layers, a piece of each tensor, and some
    of the experts."""

    first_layer: int
    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int
    num_local_experts: int  # 0: no mixture

    @classmethod
    def of(cls, coordinates: Coordinates, model: ModelInfo, stage_layers: Sequence[int]) -> ModelPart:
        """Return the part at these coordinates; ``stage_layers`` has the layers of each pipeline stage."""
        layout = coordinates.layout
        return cls(
            first_layer=sum(stage_layers[: coordinates.pp]),
            tp_rank=coordinates.tp,
            tp_size=layout.tp,
            ep_rank=coordinates.ep,
            ep_size=layout.ep,
            num_local_experts=(model.num_experts or 0) // layout.ep,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The sizes of the model that merging and splitting need."""

    num_attention_heads: int
    num_query_groups: int
    head_size: int
    vocab_size: int  # tokens; the embedding may have more rows, to divide by the ranks
    padded_vocab_size: int

    @classmethod
    def of(cls, model: ModelInfo, tp: int) -> Geometry:
        """Return the sizes of ``model`` over ``tp`` tensor-parallel ranks."""
        return cls(
            num_attention_heads=model.num_heads,
            num_query_groups=model.num_kv_heads,
            head_size=model.head_size,
            vocab_size=model.vocab_size,
            padded_vocab_size=model.padded_vocab_size(tp),
        )


def rule_for(name: str, part: ModelPart, ep_rank: int | None = None) -> Rule:
    """Return the rule of one rank's Megatron parameter, with full Hugging Face names.

    With ``ep_rank`` it is the rule for the parameter of this name on another expert-parallel rank. Raises
    KeyError for a parameter that no supported model has.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return _MODEL_RULES[name]
    prefix, rest = f"model.layers.{int(match[1]) + part.first_layer}.", match[2]
    expert = _EXPERT.fullmatch(rest) or _TE_EXPERT.fullmatch(rest)
    if expert is None:
        rule = _LAYER_RULES[rest]
    else:
        rule = _EXPERT_RULES[expert["layer"]]
        first = (part.ep_rank if ep_rank is None else ep_rank) * part.num_local_experts
        prefix += f"mlp.experts.{first + int(expert['index'])}."
    return replace(rule, hf_names=tuple(prefix + hf_name for hf_name in rule.hf_names))


def single_experts(parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters by name, with one entry per expert.

    A parameter of GroupedExperts holds all experts of a rank. In its place each expert's part is yielded as a
    view, under the name of an ungrouped expert's parameter.
    """
    for name, parameter in parameters:
        grouped = _GROUPED_EXPERTS.fullmatch(name)
        if grouped is None:
            yield name, parameter
            continue
        for index, expert in enumerate(parameter.detach()):
            yield f"{grouped[1]}.local_experts.{index}.linear_fc{grouped[2]}.weight", expert


def rules_of_all_ranks(name: str, part: ModelPart) -> list[Rule]:
    """Return the rules of the tensors that are gathered for a parameter.

    An expert's parameter has one rule per expert-parallel rank, since each rank has another expert under this
    name; any other parameter has one rule.
    """
    own = rule_for(name, part)
    if not own.is_expert:
        return [own]
    return [rule_for(name, part, ep_rank) for ep_rank in range(part.ep_size)]


def merge(rule: Rule, parts: Sequence[Tensor], geometry: Geometry) -> Tensor:
    """Merge Hugging Face tensors into the full Megatron tensor."""
    if rule.merge is Merge.single:
        return parts[0]
    if rule.merge is Merge.vocabulary:
        return functional.pad(parts[0], (0, 0, 0, geometry.padded_vocab_size - len(parts[0])))
    if rule.merge is Merge.stacked:
        return torch.cat(list(parts))
    groups = geometry.num_query_groups
    return torch.cat([part.unflatten(0, (groups, -1)) for part in parts], dim=1).flatten(0, 1)


def split(rule: Rule, full: Tensor, geometry: Geometry) -> list[Tensor]:
    """Split a full Megatron tensor into its Hugging Face tensors; the reverse of ``merge``."""
    if rule.merge is Merge.single:
        return [full]
    if rule.merge is Merge.vocabulary:
        return [full[: geometry.vocab_size]]
    if rule.merge is Merge.stacked:
        return list(full.chunk(2))
    per_group = full.unflatten(0, (geometry.num_query_groups, -1))
    queries = geometry.num_attention_heads // geometry.num_query_groups * geometry.head_size
    parts = per_group.split([queries, geometry.head_size, geometry.head_size], dim=1)
    return [part.flatten(0, 1) for part in parts]


def cut(rule: Rule, full: Tensor, rank: int, num_ranks: int) -> Tensor:
    """Return one tensor-parallel rank's part of a full tensor."""
    if rule.cut is Cut.replicated or num_ranks == 1:
        return full
    if rule.cut is Cut.gated_rows:
        return torch.cat([half.chunk(num_ranks)[rank] for half in full.chunk(2)])
    return full.chunk(num_ranks, dim=1 if rule.cut is Cut.columns else 0)[rank]


def join(rule: Rule, parts: Sequence[Tensor]) -> Tensor:
    """Join every tensor-parallel rank's part to the full tensor; the reverse of ``cut``."""
    if rule.cut is Cut.replicated or len(parts) == 1:
        return parts[0]
    if rule.cut is Cut.gated_rows:
        gates, ups = zip(*(part.chunk(2) for part in parts), strict=True)
        return torch.cat([*gates, *ups])
    return torch.cat(list(parts), dim=1 if rule.cut is Cut.columns else 0)


def full_shape(rule: Rule, local_shape: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return the full tensor's shape, computed from the shape of one tensor-parallel rank's part."""
    shape = list(local_shape)
    if rule.cut is not Cut.replicated:
        shape[1 if rule.cut is Cut.columns else 0] *= num_ranks
    return tuple(shape)


@torch.no_grad()
def load_weights(
    parameters: Iterable[tuple[str, Tensor]],
    checkpoint: HFCheckpoint,
    geometry: Geometry,
    part: ModelPart,
) -> None:
    """Fill one rank's parameters from a checkpoint, in the parameters' own dtype.

    Raises ValueError when a shape does not fit.
    """
    for name, parameter in single_experts(parameters):
        rule = rule_for(name, part)
        names = rule.hf_names
        full = merge(rule, [checkpoint[hf_name] for hf_name in names], geometry)
        local = cut(rule, full, part.tp_rank, part.tp_size)
        if local.shape != parameter.shape:
            raise ValueError(
                f"{', '.join(names)} of {checkpoint.path} give {tuple(local.shape)} for {name}, "
                f"which is {tuple(parameter.shape)}; config.json does not describe these weights"
            )
        parameter.copy_(local)


def hf_tensors(
    parameters: Iterable[tuple[str, Tensor]],
    geometry: Geometry,
    part: ModelPart,
    gather: Callable[[Rule, Tensor], Sequence[Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, full tensor) for one pipeline stage's parameters, gathering one parameter at
    a time.

    ``gather`` is collective. It returns a parameter's parts by tensor-parallel rank; for an expert's
    parameter it returns the parameters of this name by expert-parallel rank. On ranks that do not need the
    tensors it returns an empty sequence.
    """
    for name, parameter in parameters:
        rules = rules_of_all_ranks(name, part)
        parts = gather(rules[0], parameter.detach())
        if not parts:
            continue
        fulls = parts if rules[0].is_expert else [join(rules[0], parts)]
        for rule, full in zip(rules, fulls, strict=True):
            yield from zip(rule.hf_names, split(rule, full, geometry), strict=True)
