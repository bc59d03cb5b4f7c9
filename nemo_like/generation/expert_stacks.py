"""Stacks the experts of a mixture, which arrive one by one, and loads a layer's matrix of all at a time.

vLLM's loader spends some 75 microseconds of Python on each tensor. A mixture of 48 layers with 128 experts
has 18,432 tensors of experts: that takes more than a second, longer than moving the bytes. The same loader
takes one tensor with a matrix of every expert that its worker has of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.layer import MoERunner

NamedTensors = list[tuple[str, Tensor]]

_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<index>\d+)\.(?P<matrix>\w+)\.weight")


@dataclass(frozen=True, slots=True)
class _Matrix:
    """The parameter of a layer that a matrix of its experts belongs to, and vLLM's name of its part there."""

    parameter: str
    shard: str


@dataclass(slots=True)
class _Layer:
    """A layer's experts, and which of their tensors have come."""

    name: str
    runner: MoERunner
    matrices: Mapping[str, _Matrix]  # by their names in the checkpoint
    num_experts: int
    own: dict[int, None]  # numbers of this worker's experts, in the order in which it has them
    # Tensors by matrix and expert, until the matrix is loaded; then its name is in ``loaded``.
    held: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)

    def take(self, matrix: str, expert: int, tensor: Tensor, device: torch.device) -> None:
        """Hold the tensor; once every own expert has one, load them all as one stack."""
        if expert not in self.own:
            return
        held = self.held.setdefault(matrix, {})
        held[expert] = tensor
        if len(held) < len(self.own):
            return
        stack = torch.stack([held[one] for one in self.own]).to(device)
        del self.held[matrix], held
        target = self.matrices[matrix]
        parameter = getattr(self.runner.routed_experts, target.parameter)
        # The loader takes a tensor of three axes for all of the worker's experts, and asks for one's number.
        first = next(iter(self.own))
        parameter.weight_loader(parameter, stack, target.parameter, shard_id=target.shard, expert_id=first)
        self.loaded.add(matrix)

    def missing(self) -> list[str]:
        """Return the names of the own experts' tensors that have not come."""
        return [
            f"{self.name}.{expert}.{matrix}.weight"
            for matrix in self.matrices
            if matrix not in self.loaded
            for expert in self.own
            if expert not in self.held.get(matrix, {})
        ]


class ExpertStacks:
    """Loads the experts of one transfer, in whatever order they come."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._layers: dict[str, _Layer | None] = {}  # None: a layer whose experts vLLM loads one by one

    def take(self, tensors: NamedTensors) -> NamedTensors:
        """Take the experts' tensors, load the matrices that they complete, and return the other tensors."""
        others = []
        for name, tensor in tensors:
            match = _EXPERT.fullmatch(name)
            layer = self._layer(match["layer"]) if match else None
            if match is None or layer is None or not _fits(layer, match, tensor):
                others.append((name, tensor))
            else:
                layer.take(match["matrix"], int(match["index"]), tensor, self._device)
        return others

    def loaded(self) -> set[str]:
        """Return the names of the model's parameters that are loaded.

        Raises RuntimeError that names the tensors without which a layer is incomplete.
        """
        layers = [layer for layer in self._layers.values() if layer is not None]
        if missing := [name for layer in layers for name in layer.missing()]:
            raise RuntimeError(f"the trainer sent no weights for {missing[:8]} ({len(missing)} in all)")
        return {
            f"{layer.name}.routed_experts.{matrix.parameter}"
            for layer in layers
            for matrix in layer.matrices.values()
        }

    def _layer(self, name: str) -> _Layer | None:
        if name not in self._layers:
            self._layers[name] = _stacked_layer(self._model, name)
        return self._layers[name]


def _fits(layer: _Layer, match: re.Match[str], tensor: Tensor) -> bool:
    is_known = match["matrix"] in layer.matrices and int(match["index"]) < layer.num_experts
    return is_known and tensor.dim() == 2


def _stacked_layer(model: torch.nn.Module, name: str) -> _Layer | None:
    """Return the layer of this name, or None unless its loader takes the matrices of all experts at once. It
    does where vLLM has each expert once, with unquantized weights under the checkpoint's names."""
    try:
        runner = model.get_submodule(name)
    except AttributeError:
        return None
    experts = getattr(runner, "routed_experts", None)
    if not isinstance(runner, MoERunner) or experts is None:
        return None
    config, manager = experts.moe_config, experts.expert_map_manager
    parameters = [getattr(experts, parameter, None) for parameter in ("w13_weight", "w2_weight")]
    is_plain = all(
        isinstance(one, Tensor) and one.dim() == 3 and one.is_floating_point() and one.element_size() > 1
        for one in parameters
    )
    is_once = config.num_experts == config.num_logical_experts and not manager.num_fused_shared_experts
    if not (is_plain and is_once and config.is_act_and_mul and not experts.lora_base_layer_prefix):
        return None
    matrices = {
        experts.ckpt_gate_proj_name: _Matrix("w13_weight", "w1"),
        experts.ckpt_up_proj_name: _Matrix("w13_weight", "w3"),
        experts.ckpt_down_proj_name: _Matrix("w2_weight", "w2"),
    }
    own = own_experts(config.num_experts, manager.expert_map)
    return _Layer(name, runner, matrices, config.num_experts, dict.fromkeys(own)) if own else None


def own_experts(num_experts: int, positions: Tensor | None) -> list[int]:
    """Return the numbers of the experts that a worker has, in the worker's order.

    ``positions``: [experts] int, the position of each expert in the worker, -1 where another worker has it;
    None where this worker has every expert.
    """
    if positions is None:
        return list(range(num_experts))
    by_expert = positions.tolist()[:num_experts]
    return sorted((one for one in range(num_experts) if by_expert[one] >= 0), key=by_expert.__getitem__)


def repack_experts(model: torch.nn.Module) -> None:
    """Pack the weights of a model's experts again, on a CPU.

    On a CPU, vLLM replaces the experts' weights by packed ones when the engine starts, and not again. A
    reload leaves plain weights, which would then be read as packed ones.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and getattr(layer, "w13_weight", None) is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
