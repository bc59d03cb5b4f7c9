"""Converts weights between Hugging Face checkpoints and Megatron-core's GPT model, by the rules of a family.

Each expert-parallel rank holds some experts of a mixture, whole or, with expert tensor parallelism, a part of
each. Loading reads one parameter at a time, so a whole model is never in memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from nemo_like.cluster.coordinates import Coordinates
from nemo_like.models.family import Family
from nemo_like.models.model_info import ModelInfo
from nemo_like.models.weight_names import MODEL_RULES, Cut, Merge, Rule
from nemo_like.policy.backends.hf_checkpoint import HFCheckpoint

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.local_experts\.(?P<index>\d+)\.(?P<layer>linear_fc[12])\.(?P<kind>weight|bias)"
)
# Transformer Engine's grouped layers number their weights.
_TE_EXPERT = re.compile(r"mlp\.experts\.(?P<layer>linear_fc[12])\.(?P<kind>weight)(?P<index>\d+)")
_GROUPED_EXPERTS = re.compile(r"(.+\.mlp\.experts)\.(?:weight([12])|linear_fc([12])\.bias)")

_TRANSPOSED = (Merge.transposed, Merge.alternating)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """The part of each layer that one rank holds: a piece of each tensor, and some of the experts. Names of
    its weights follow from its family."""

    family: Family
    tp_rank: int
    tp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int
    num_local_experts: int  # 0: no mixture

    @classmethod
    def of(cls, coordinates: Coordinates, model: ModelInfo) -> ModelPart:
        """Return the part at these coordinates."""
        layout = coordinates.layout
        return cls(
            family=model.family,
            tp_rank=coordinates.tp,
            tp_size=layout.tp,
            ep_rank=coordinates.ep,
            ep_size=layout.ep,
            etp_rank=coordinates.etp,
            etp_size=layout.etp,
            num_local_experts=(model.num_experts or 0) // layout.ep,
        )

    def cut_of(self, rule: Rule) -> tuple[int, int]:
        """Return this rank among those over which a tensor is cut, and how many these are."""
        return (self.etp_rank, self.etp_size) if rule.is_expert else (self.tp_rank, self.tp_size)


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

    @property
    def group_sizes(self) -> list[int]:
        """The rows of a key-value group's queries, of its key and of its value."""
        return [
            self.num_attention_heads // self.num_query_groups * self.head_size,
            self.head_size,
            self.head_size,
        ]


def in_whole_model(name: str, first_layer: int) -> str:
    """Return a parameter's name with its layer's number in the whole model, for a part of the model whose
    layer 0 is ``first_layer``."""
    match = _LAYER.fullmatch(name)
    return name if match is None else f"decoder.layers.{int(match[1]) + first_layer}.{match[2]}"


def rule_for(name: str, part: ModelPart, ep_rank: int | None = None) -> Rule:
    """Return the rule of one rank's Megatron parameter, with full Hugging Face names.

    The number in its name is the layer's in the whole model. With ``ep_rank`` it is the rule for the
    parameter of this name on another expert-parallel rank. Raises KeyError for a parameter that no model of
    the family has.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return MODEL_RULES[name]
    prefix, rest = f"model.layers.{match[1]}.", match[2]
    expert = _EXPERT.fullmatch(rest) or _TE_EXPERT.fullmatch(rest)
    if expert is None:
        rule = part.family.layer_rule(rest)
    else:
        rule = part.family.expert_rule(f"{expert['layer']}.{expert['kind']}")
        first = (part.ep_rank if ep_rank is None else ep_rank) * part.num_local_experts
        prefix += f"{part.family.experts_at}.{first + int(expert['index'])}."
    return replace(rule, hf_names=tuple(prefix + hf_name for hf_name in rule.hf_names))


def expert_of(name: str) -> tuple[str, int] | None:
    """Return the linear layer of all experts, such as decoder.layers.0.mlp.experts.linear_fc1, to which the
    weight of one expert of a rank belongs, and that expert's index; None for another parameter, such as a
    bias."""
    match = _LAYER.fullmatch(name)
    expert = match and (_EXPERT.fullmatch(match[2]) or _TE_EXPERT.fullmatch(match[2]))
    if not match or not expert or expert["kind"] != "weight":
        return None
    return f"decoder.layers.{match[1]}.mlp.experts.{expert['layer']}", int(expert["index"])


def router_biases(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the biases by which routers choose experts, which are buffers, by name."""
    return (named for named in model.named_buffers() if named[0].endswith(".router.expert_bias"))


def loaded_tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all that a checkpoint has of a model, by name: its parameters and the biases of routers."""
    yield from model.named_parameters()
    yield from router_biases(model)


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
        layer = f"linear_fc{grouped[2]}.weight" if grouped[2] else f"linear_fc{grouped[3]}.bias"
        for index, expert in enumerate(parameter.detach()):
            yield f"{grouped[1]}.local_experts.{index}.{layer}", expert


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
    if rule.merge in _TRANSPOSED:
        rows = parts[0].t()  # a bias as it is
        return rows if rule.merge is Merge.transposed else torch.cat([rows[::2], rows[1::2]])
    if rule.merge is Merge.fused_qkv:
        parts = parts[0].split([geometry.num_query_groups * size for size in geometry.group_sizes])
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
    if rule.merge in _TRANSPOSED:
        is_plain = rule.merge is Merge.transposed
        rows = full if is_plain else torch.stack(full.chunk(2), dim=1).flatten(0, 1)
        return [rows.t().contiguous()]
    per_group = full.unflatten(0, (geometry.num_query_groups, -1)).split(geometry.group_sizes, dim=1)
    parts = [part.flatten(0, 1) for part in per_group]
    return [torch.cat(parts)] if rule.merge is Merge.fused_qkv else parts


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
        local = cut(rule, full, *part.cut_of(rule))
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
    parameter it returns the parts of the parameters of this name by expert-parallel rank, then by the rank
    among those that share the expert. On ranks that do not need the tensors it returns an empty sequence.
    """
    for name, parameter in parameters:
        rules = rules_of_all_ranks(name, part)
        parts = gather(rules[0], parameter.detach())
        if not parts:
            continue
        size = len(parts) // len(rules)
        for index, rule in enumerate(rules):
            full = join(rule, parts[index * size : (index + 1) * size])
            yield from zip(rule.hf_names, split(rule, full, geometry), strict=True)
