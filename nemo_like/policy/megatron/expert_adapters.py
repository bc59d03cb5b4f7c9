"""Low-rank adapters beside the experts of a mixture in Megatron-core.

An expert has an adapter for gate and up together, and one for down, as peft has them for the two parameters
in which transformers stacks all experts of a layer. A rank holds those of its own experts:

    A  [experts, rank, inputs]
    B  [experts, layers, outputs of a layer, rank], where gate and up are two layers

peft has the outputs of gate and up in the order in which a checkpoint's parameter has them: those of gate
first, or in gpt-oss one of gate and one of up in turn.

Where tensor-parallel ranks hold a part of each expert, the third axis is cut as the weight beside it: of B
for gate and up, of A for down. The other of the two is on every rank. Its gradient is summed over these
ranks, since each computes a part of it: tokens go to all of them, and their outputs are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor, nn
from torch.nn import functional

from nemo_like.models.adapter_layers import DOWN, GATE_AND_UP, adapted_experts, adapter_scale
from nemo_like.models.weight_names import Cut, Merge, Rule
from nemo_like.policy.backends.adapters import LORA_A, LORA_B, expert_layer, initial_value, peft_name
from nemo_like.policy.megatron.adapter_parts import AdapterPart, AdapterSettings
from nemo_like.policy.megatron.experts import GroupedExperts, grouped_products

_CUT_AXIS = 2
# A grouped product takes matrices whose rows are multiples of 16 bytes.
_RANK_MULTIPLE = 8
# The parameter of transformers that has the weights of each of an expert's layers in Megatron-core, and how
# many layers of a checkpoint that is.
PARAMETERS = {"linear_fc1": (GATE_AND_UP, 2), "linear_fc2": (DOWN, 1)}


@dataclass(frozen=True, slots=True)
class ExpertAdapterPart(AdapterPart):
    """One rank's part of the A or the B of all experts of a layer."""

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the full tensor, as peft saves it."""
        shape = list(self.parameter.shape)
        shape[0] *= self.part.ep_size
        if self.rule.cut is not Cut.replicated:
            shape[_CUT_AXIS] *= self.part.etp_size
        return tuple(as_saved(torch.empty(shape, device="meta"), self.rule.merge).shape)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the full tensor of all ranks' parts, as peft saves it. ``parts`` are in the order of the
        ranks' experts, then of those ranks that share an expert."""
        size, is_cut = self.part.etp_size, self.rule.cut is not Cut.replicated
        sharing = [parts[start : start + size] for start in range(0, len(parts), size)]
        stacked = torch.cat([torch.cat([*one], _CUT_AXIS) if is_cut else one[0] for one in sharing])
        return as_saved(stacked, self.rule.merge)

    def sharded(self) -> ShardedTensor:
        """Return the part with its place in the full tensor, as Megatron-core's checkpoints take it."""
        part, is_cut = self.part, self.rule.cut is not Cut.replicated
        places = [(0, part.ep_rank, part.ep_size)]
        if is_cut:
            places.append((_CUT_AXIS, part.etp_rank, part.etp_size))
        copy = parallel_state.get_expert_data_parallel_rank()
        replica = (0, 0 if is_cut else part.etp_rank, copy)
        return ShardedTensor.from_rank_offsets(self.name, self.parameter, *places, replica_id=replica)


def as_saved(stacked: Tensor, merge: Merge) -> Tensor:
    """Return a stacked tensor of all experts as peft saves it: A [experts x rank, inputs], expert by expert,
    or B [outputs, rank x experts], in which the experts lie side by side for each row of A. The outputs of
    two layers are in turn where those of a weight are, by its ``merge``."""
    if stacked.dim() == 3:
        return stacked.flatten(0, 1)
    outputs = (2, 1) if merge is Merge.alternating else (1, 2)
    return stacked.permute(*outputs, 3, 0).flatten(2, 3).flatten(0, 1)


def stacked_a(saved: Tensor, num_experts: int) -> Tensor:
    """Return the A of all experts, [experts, rank, inputs]; the reverse of ``as_saved``."""
    return saved.unflatten(0, (num_experts, -1))


def stacked_b(saved: Tensor, num_experts: int, num_layers: int, merge: Merge) -> Tensor:
    """Return the B of all experts, [experts, layers, outputs of a layer, rank]; the reverse of
    ``as_saved``."""
    of_experts = saved.unflatten(1, (-1, num_experts))
    if merge is Merge.alternating:
        return of_experts.unflatten(0, (-1, num_layers)).permute(3, 1, 0, 2)
    return of_experts.unflatten(0, (num_layers, -1)).permute(3, 0, 1, 2)


class ExpertAdapters(nn.Module):
    """The adapters beside one linear layer of all experts of a rank."""

    def __init__(self, rule: Rule, weight: Tensor, place: tuple[int, str], settings: AdapterSettings) -> None:
        """Make the adapters; ``rule`` is the rule of an expert's weight, ``weight`` is this rank's part of
        it, and ``place`` is the layer's number in the whole model with the linear layer's name."""
        super().__init__()
        self.is_enabled = True
        self.parts: list[AdapterPart] = []
        self._settings, self._scaling, self._merge = settings, adapter_scale(settings.lora), rule.merge
        part, rank = settings.part, settings.lora.rank
        parameter, num_layers = PARAMETERS[place[1]]
        layer = expert_layer(f"model.layers.{place[0]}", parameter, adapted_experts(settings.lora))
        num_experts = part.num_local_experts * part.ep_size
        outputs, inputs = weight.shape[0], weight.shape[1]
        cuts_inputs = rule.cut is Cut.columns
        outputs, inputs = (
            (outputs, inputs * part.etp_size) if cuts_inputs else (outputs * part.etp_size, inputs)
        )
        down, up = (
            initial_value(peft_name(layer, name), shape, settings.lora.adapter_path)
            for name, shape in {
                LORA_A: (num_experts * rank, inputs),
                LORA_B: (outputs, rank * num_experts),
            }.items()
        )
        cut_a, cut_b = (Cut.columns, Cut.replicated) if cuts_inputs else (Cut.replicated, Cut.rows)
        device = weight.device
        self._down = self._add(peft_name(layer, LORA_A), cut_a, stacked_a(down, num_experts), device)
        up = stacked_b(up, num_experts, num_layers, rule.merge)
        self._up = self._add(peft_name(layer, LORA_B), cut_b, up, device)

    def _add(self, name: str, cut: Cut, value: Tensor, device: torch.device) -> nn.Parameter:
        """Make this rank's part of the A or B of all experts, and mark it as Megatron-core's experts are
        marked (``ScoringGPTModel``)."""
        part = self._settings.part
        value = value.chunk(part.ep_size)[part.ep_rank]
        is_cut = cut is not Cut.replicated and part.etp_size > 1
        if is_cut:
            value = value.chunk(part.etp_size, _CUT_AXIS)[part.etp_rank]
        parameter: Any = nn.Parameter(value.to(device, copy=True).contiguous())
        parameter.allreduce = part.ep_size == 1
        if part.etp_size == 1:
            parameter.tensor_model_parallel = part.ep_size > 1
            parameter.sequence_parallel = part.ep_size == 1 and self._settings.sequence_parallel
        elif is_cut:
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = _CUT_AXIS, 1
        rule = Rule((name,), cut if part.etp_size > 1 else Cut.replicated, self._merge, is_expert=True)
        self.parts.append(ExpertAdapterPart(rule, parameter, part))
        return parameter

    def of_expert(self, index: int, hidden: Tensor) -> Tensor:
        """Return the addition of this rank's expert ``index`` to its layer's output. hidden: [tokens,
        inputs]; returns [tokens, outputs]."""
        down, up = (part[index].to(hidden.dtype) for part in (self._down, self._up))
        down, up = self._summed_gradients(down, up)
        return functional.linear(functional.linear(hidden, down), self._scaling * up.flatten(0, 1))

    def forward(self, hidden: Tensor, ends: Tensor) -> Tensor:
        """Return the additions of all experts of this rank. hidden: [tokens, inputs], expert by expert; ends:
        [experts] int32, one past each expert's last token. Returns [tokens, outputs]."""
        down, up = self._summed_gradients(self._down.to(hidden.dtype), self._up.to(hidden.dtype))
        extra = -down.shape[1] % _RANK_MULTIPLE
        down, up = functional.pad(down, (0, 0, 0, extra)), functional.pad(up.flatten(1, 2), (0, extra))
        return grouped_products(grouped_products(hidden, down, ends), self._scaling * up, ends)

    def merged(self, index: int, weight: Tensor) -> Tensor:
        """Return this rank's part of the weight of its expert ``index`` with the adapter merged into it, in
        float32."""
        return weight.float() + self._scaling * self._up[index].flatten(0, 1) @ self._down[index]

    def _summed_gradients(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """Have the gradient of that of the two which is on every rank summed over the ranks that share an
        expert."""
        if self._settings.part.etp_size == 1:
            return down, up
        group = parallel_state.get_expert_tensor_parallel_group()
        tensors = {part.rule.cut: tensor for part, tensor in zip(self.parts, (down, up), strict=True)}
        whole = copy_to_tensor_model_parallel_region(tensors[Cut.replicated], group)
        return (whole, up) if tensors[Cut.replicated] is down else (down, whole)


def place_beside(experts: nn.Module, layer: str, adapters: ExpertAdapters) -> None:
    """Have the experts' linear layers called ``layer`` add what ``adapters`` computes to their outputs."""
    if isinstance(experts, SequentialMLP):
        for index, expert in enumerate(experts.local_experts):
            expert.get_submodule(layer).register_forward_hook(partial(_add_of_one, adapters, index))
    elif isinstance(experts, GroupedExperts):
        experts.additions[layer] = partial(_added, adapters)
    else:  # Transformer Engine's
        experts.get_submodule(layer).register_forward_hook(partial(_add_of_all, adapters))


def _add_of_one(
    adapters: ExpertAdapters, index: int, linear: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    output, bias = outputs
    return (output + adapters.of_expert(index, inputs[0]), bias) if adapters.is_enabled else outputs


def _add_of_all(
    adapters: ExpertAdapters, linear: nn.Module, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> tuple[Any, ...]:
    (hidden, num_tokens), (output, bias) = inputs, outputs
    ends = torch.as_tensor(num_tokens).cumsum(0).to(hidden.device, torch.int32)
    return _added(adapters, hidden, ends, output), bias


def _added(adapters: ExpertAdapters, hidden: Tensor, ends: Tensor, output: Tensor) -> Tensor:
    return output + adapters(hidden, ends) if adapters.is_enabled else output
