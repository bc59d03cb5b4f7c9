"""The experts of a mixture, which come one by one and are loaded a layer's matrix at a time.

vLLM's loader spends some 75 microseconds of Python on each tensor, and a mixture of 48 layers with 128
experts has 18,432 of them: more than a second, where the bytes need less. The same loader takes a matrix of
all of a layer's experts that its worker has as one tensor.
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
    """Where a matrix of every expert belongs: a parameter of the layer, and vLLM's name of the part of it."""

    parameter: str
    shard: str


@dataclass(slots=True)
class _Layer:
    """A layer's experts, and what has come of them."""

    name: str
    runner: MoERunner
    matrices: Mapping[str, _Matrix]  # by their names in the checkpoint
    num_experts: int
    own: dict[int, None]  # of all workers' experts those of this one, in the order in which it has them
    # By matrix and expert; what is loaded is gone, and its matrix is in ``loaded``.
    held: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)

    def take(self, matrix: str, expert: int, tensor: Tensor, device: torch.device) -> None:
        """Hold the tensor, or load the matrix of all own experts if it is the last that was missing."""
        if expert not in self.own:
            return
        held = self.held.setdefault(matrix, {})
        held[expert] = tensor
        if len(held) < len(self.own):
            return
        stack = torch.stack([held[one] for one in self.own]).to(device)
        del self.held[matrix], held
        place = self.matrices[matrix]
        parameter = getattr(self.runner.routed_experts, place.parameter)
        # With three axes the tensor is taken for all of the worker's experts, of which it wants one's number.
        first = next(iter(self.own))
        parameter.weight_loader(parameter, stack, place.parameter, shard_id=place.shard, expert_id=first)
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
    """Loads the experts of one session of loading, whatever the order in which they come."""

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        self._model, self._device = model, device
        self._layers: dict[str, _Layer | None] = {}  # None: a layer whose experts vLLM is to load one by one

    def take(self, tensors: NamedTensors) -> NamedTensors:
        """Take the experts' tensors, and load what is complete by them; return the others."""
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
            f"{layer.name}.routed_experts.{place.parameter}"
            for layer in layers
            for place in layer.matrices.values()
        }

    def _layer(self, name: str) -> _Layer | None:
        if name not in self._layers:
            self._layers[name] = _stacked_layer(self._model, name)
        return self._layers[name]


def _fits(layer: _Layer, match: re.Match[str], tensor: Tensor) -> bool:
    is_known = match["matrix"] in layer.matrices and int(match["index"]) < layer.num_experts
    return is_known and tensor.dim() == 2


def _stacked_layer(model: torch.nn.Module, name: str) -> _Layer | None:
    """Return the layer of this name if its loader takes the matrices of all experts at once: where vLLM has
    them under the checkpoint's names, each expert once, in weights of plain numbers."""
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


def own_experts(num_experts: int, places: Tensor | None) -> list[int]:
    """Return which experts a worker has, in their order there.

    ``places``: [experts] int, the place of each among the worker's own, -1 for those of other workers; None
    where it has all.
    """
    if places is None:
        return list(range(num_experts))
    by_expert = places.tolist()[:num_experts]
    return sorted((one for one in range(num_experts) if by_expert[one] >= 0), key=by_expert.__getitem__)


def repack_experts(model: torch.nn.Module) -> None:
    """Pack the weights of a model's experts again, on a CPU.

    There packed weights replace the experts' plain ones, but vLLM packs them at the engine's start only. A
    reload leaves plain weights, which would be read as packed ones.
    """
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None and getattr(layer, "w13_weight", None) is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
