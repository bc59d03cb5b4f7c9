"""Low-rank adapters beside frozen linear layers of Megatron-core.

Every Hugging Face layer has an adapter of its own, A [rank, inputs] and B [outputs, rank], also where
Megatron-core has one linear layer for several: for queries, keys and values, and for gate and up. Over
tensor-parallel ranks an adapter is cut like the weight beside it:

    weight cut by      A              B             what the ranks exchange
    rows (outputs)     on every rank  by rows       the gradient of x @ A.T is summed in the backward pass
    columns (inputs)   by columns     on every rank x @ A.T is summed in the forward pass

With sequence parallelism each rank has a part of the tokens outside of the layers. Then x @ A.T is gathered
in the first case, and its sum is scattered in the second. All of these tensors are [tokens, rank].

Experts of a mixture have adapters of their own (``expert_adapters.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor, nn
from torch.nn import functional

from nemo_like.models.adapter_layers import adapted_experts, adapted_layers, adapter_scale
from nemo_like.models.weight_names import OUTPUT_LAYER, Cut, Rule
from nemo_like.policy.backends.adapters import ADAPTER_DTYPE, LORA_A, LORA_B, initial_value, peft_name
from nemo_like.policy.megatron.adapter_parts import AXES, AdapterPart, AdapterSettings
from nemo_like.policy.megatron.expert_adapters import PARAMETERS, ExpertAdapters, place_beside
from nemo_like.policy.megatron.model_chunks import first_layer
from nemo_like.policy.megatron.weight_conversion import (
    cut,
    expert_of,
    full_shape,
    merge,
    rule_for,
    single_experts,
    split,
)

_LINEAR_LAYERS = (
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
# How ranks exchange x @ A.T, by whether the weight is cut by columns and tokens are divided over ranks.
_EXCHANGES: dict[tuple[bool, bool], Callable[[Tensor], Tensor]] = {
    (False, False): copy_to_tensor_model_parallel_region,
    (False, True): gather_from_sequence_parallel_region,
    (True, False): reduce_from_tensor_model_parallel_region,
    (True, True): reduce_scatter_to_sequence_parallel_region,
}


class LayerAdapters(nn.Module):
    """The adapters beside one linear layer of Megatron-core, which may be made of several Hugging Face
    layers; some of these may have no adapter."""

    def __init__(self, rule: Rule, weight: Tensor, settings: AdapterSettings) -> None:
        """Make the adapters; ``rule`` is the rule of the layer's weight, and ``weight`` is this rank's part
        of it."""
        super().__init__()
        self.is_enabled = True
        self.parts: list[AdapterPart] = []
        self._rule, self._settings = rule, settings
        lora, tp_size = settings.lora, settings.part.tp_size
        self._scaling = adapter_scale(lora)
        groups = settings.geometry.num_query_groups // tp_size
        self._local_geometry = replace(settings.geometry, num_query_groups=groups)
        self._cuts_inputs = rule.cut is Cut.columns
        cut_a, cut_b = (Cut.columns, Cut.replicated) if self._cuts_inputs else (Cut.replicated, Cut.rows)
        # A of each adapter, and B of each Hugging Face layer, without columns where there is no adapter.
        self._downs: list[Tensor] = []
        self._ups: list[Tensor] = []
        full = torch.empty(full_shape(rule, weight.shape, tp_size), device="meta")
        for hf_name, hf_weight in zip(rule.hf_names, split(rule, full, settings.geometry), strict=True):
            layer, (outputs, inputs) = hf_name.removesuffix(".weight"), hf_weight.shape
            if layer.rpartition(".")[2] in adapted_layers(lora):
                down, up = Rule((peft_name(layer, LORA_A),), cut_a), Rule((peft_name(layer, LORA_B),), cut_b)
                self._downs.append(self._add(down, (lora.rank, inputs), weight.device))
                self._ups.append(self._add(up, (outputs, lora.rank), weight.device))
            else:
                self._ups.append(torch.empty(outputs // tp_size, 0, device=weight.device))

    def _add(self, rule: Rule, shape: tuple[int, int], device: torch.device) -> nn.Parameter:
        """Make this rank's part of an A or B with its first value, and mark it so that Megatron-core sums its
        gradient and counts it in the norm."""
        part = self._settings.part
        value = cut(
            rule,
            initial_value(rule.hf_names[0], shape, self._settings.lora.adapter_path),
            part.tp_rank,
            part.tp_size,
        )
        parameter: Any = nn.Parameter(value.to(device, copy=True))
        if rule.cut is Cut.replicated:
            # Each rank sees its own part of the tokens, so the gradients of the ranks have to be summed.
            parameter.sequence_parallel = self._settings.sequence_parallel
        else:
            parameter.tensor_model_parallel = True
            parameter.partition_dim, parameter.partition_stride = AXES[rule.cut], 1
        self.register_parameter(f"part_{len(self.parts)}", parameter)
        self.parts.append(AdapterPart(rule, parameter, part))
        return parameter

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the adapters' addition to the layer's output. hidden: [s, n, inputs]; returns [s', n,
        outputs]; both have the shapes of the layer's own input and output on this rank."""
        hidden = functional.dropout(hidden, self._settings.lora.dropout, self.training)
        down = functional.linear(hidden, self._down().to(hidden.dtype))
        if self._settings.part.tp_size > 1:
            down = _EXCHANGES[self._cuts_inputs, self._settings.sequence_parallel](down)
        return functional.linear(down, self._up().to(hidden.dtype))

    def merged(self, weight: Tensor) -> Tensor:
        """Return this rank's part of the layer's weight with the adapters merged into it, in float32."""
        return weight.float() + self._up() @ self._down()

    def _down(self) -> Tensor:
        """Return the adapters' A, one below the other, [sum of ranks, inputs]."""
        return torch.cat(self._downs)

    def _up(self) -> Tensor:
        """Return the adapters' B times their scaling, [outputs, sum of ranks], with the outputs in the
        layer's order; the columns of other adapters are 0."""
        blocks = torch.block_diag(*self._ups).split([len(up) for up in self._ups])
        return self._scaling * merge(self._rule, blocks, self._local_geometry)


class MegatronAdapters(nn.Module):
    """The adapters of one rank's part of a model, by the name of the linear layer beside them; empty for a
    model that trains as a whole. ``head`` is a critic's output layer, which trains with them."""

    def __init__(
        self, layers: Mapping[str, LayerAdapters | ExpertAdapters], head: nn.Linear | None = None
    ) -> None:
        super().__init__()
        self._names = {name: index for index, name in enumerate(layers)}
        self._layers = nn.ModuleList(layers.values())
        self.head = head

    def __bool__(self) -> bool:
        return bool(self._names)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Make the model compute without its adapters within the block."""
        self._set_enabled(False)
        try:
            yield
        finally:
            self._set_enabled(True)

    def _set_enabled(self, value: bool) -> None:
        for layer in self._of_layers():
            layer.is_enabled = value

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """Return the parameter called ``name`` with its adapters merged into it, in ``weight``'s dtype; a
        parameter without adapters comes back unchanged."""
        expert = expert_of(name)
        layer, leaf = (expert[0], "weight") if expert else name.rpartition(".")[::2]
        if leaf != "weight" or layer not in self._names:
            return weight
        beside: Any = self._layers[self._names[layer]]
        merged: Tensor = beside.merged(expert[1], weight) if expert else beside.merged(weight)
        return merged.to(weight.dtype)

    def parts(self) -> Iterator[AdapterPart]:
        """Yield this rank's part of every A and B of its pipeline stage."""
        for layer in self._of_layers():
            yield from layer.parts

    def sharded_state_dict(self) -> dict[str, ShardedTensor]:
        """Return this rank's parts by parameter name, as Megatron-core's checkpoints take them: each with its
        place in the full tensor, which is stored under peft's name; of an output layer each rank has all."""
        parts = {part.parameter: part for part in self.parts()}
        found = {}
        for name, parameter in self.named_parameters():
            part = parts.get(parameter)
            found[name] = (
                make_sharded_tensor_for_checkpoint(parameter, OUTPUT_LAYER)
                if part is None
                else part.sharded()
            )
        return found

    def _of_layers(self) -> Iterator[LayerAdapters | ExpertAdapters]:
        for layer in self._layers:
            assert isinstance(layer, LayerAdapters | ExpertAdapters)
            yield layer


def add_adapters(
    chunks: Sequence[GPTModel], settings: AdapterSettings, head: nn.Linear | None = None
) -> MegatronAdapters:
    """Put adapters beside the target layers of this rank's chunks of a model, and freeze all other
    parameters but those of ``head``, which is in the last chunk and gets the adapters' dtype. The adapters
    of a chunk become its submodule ``adapters``."""
    layers: dict[str, LayerAdapters | ExpertAdapters] = {}
    for chunk in chunks:
        chunk.requires_grad_(False)
        own: dict[str, LayerAdapters | ExpertAdapters] = {}
        for index, layer in enumerate(chunk.decoder.layers):
            number = index + first_layer(chunk)
            own |= _beside_linear_layers(layer, number, settings)
            if isinstance(layer.mlp, MoELayer):
                own |= _beside_experts(layer.mlp.experts, number, settings)
        chunk.adapters = MegatronAdapters(own, head if chunk is chunks[-1] else None)
        layers |= own
    if head is not None:
        head.to(ADAPTER_DTYPE).requires_grad_(True)
    return MegatronAdapters(layers, head)


def _beside_linear_layers(
    layer: nn.Module, number: int, settings: AdapterSettings
) -> dict[str, LayerAdapters]:
    """Put adapters beside a layer's own linear layers; in a mixture these are of its attention."""
    targets = adapted_layers(settings.lora, settings.part.num_local_experts or None)
    found = {}
    for suffix in _LINEAR_LAYERS:
        name = f"decoder.layers.{number}.{suffix}"
        rule = rule_for(f"{name}.weight", settings.part)
        if any(hf_name.split(".")[-2] in targets for hf_name in rule.hf_names):
            linear = layer.get_submodule(suffix)
            found[name] = LayerAdapters(rule, linear.weight, settings)
            linear.register_forward_hook(partial(_add_output, found[name]))
    return found


def _beside_experts(experts: nn.Module, number: int, settings: AdapterSettings) -> dict[str, ExpertAdapters]:
    """Put adapters beside the experts of a layer."""
    found: dict[str, ExpertAdapters] = {}
    prefix, adapted = f"decoder.layers.{number}.mlp.experts", adapted_experts(settings.lora)
    for name, parameter in single_experts(experts.named_parameters(prefix)):
        place = expert_of(name)
        if place is None:  # a bias
            continue
        linear_layer = place[0].rpartition(".")[2]
        if place[1] == 0 and PARAMETERS[linear_layer][0] in adapted:
            rule = rule_for(name, settings.part)
            found[place[0]] = ExpertAdapters(rule, parameter, (number, linear_layer), settings)
            place_beside(experts, linear_layer, found[place[0]])
    return found


def _add_output(
    adapters: LayerAdapters, linear: nn.Module, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, Any]
) -> tuple[Tensor, Any]:
    """Add the adapters' output to their layer's output, which comes with a bias or None."""
    output, bias = outputs
    return (output + adapters(inputs[0]), bias) if adapters.is_enabled else outputs


def without_fused_norms(spec: ModuleSpec | TransformerBlockSubmodules) -> None:
    """Replace, in place, each layer that norms its input by a norm and a linear layer.

    Transformer Engine's fused layer hides the normed input, which an adapter needs.
    """
    backend = TESpecProvider()
    for layer in [spec] if isinstance(spec, ModuleSpec) else spec.layer_specs:
        parts, attention = layer.submodules, layer.submodules.self_attention.submodules
        if attention.linear_qkv is backend.column_parallel_layer_norm_linear():
            attention.linear_qkv = backend.column_parallel_linear()
            parts.input_layernorm = backend.layer_norm()
        if getattr(parts.mlp.submodules, "linear_fc1", None) is backend.column_parallel_layer_norm_linear():
            parts.mlp.submodules.linear_fc1 = backend.column_parallel_linear()
            parts.pre_mlp_layernorm = backend.layer_norm()
