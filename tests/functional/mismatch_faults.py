"""An engine and a worker in which single modules can be made to compute something else."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from nemo_like.generation.expert_stacks import ExpertStacks
from nemo_like.generation.vllm_engine import VllmEngine
from nemo_like.generation.weight_channels import NamedTensors, WholeInMemory
from nemo_like.mismatch.traced_worker import TracedWorker
from nemo_like.plan.roles import Role

TARGETS = {
    Role.engine: f"{__name__}:FaultyEngine",
    Role.policy_worker: f"{__name__}:FaultyWorker",
}


class _Swapped:
    """A layer's way to multiply that returns the two halves in the other order."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def apply(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        first, second = self._own.apply(*args, **kwargs).chunk(2, dim=-1)
        return torch.cat((second, first), dim=-1)


class FaultyEngine(VllmEngine):
    """Its faults are in vLLM's model, or in what is loaded into it."""

    _mend: Callable[[], object] | None = None

    def plant(self, fault: str, where: str) -> None:
        """Plant one fault in the module or the tensor of this name."""
        self._mend = self._thread.call(lambda: getattr(self, f"_{fault}")(where))

    def mend(self) -> None:
        """Take the fault away."""
        assert self._mend is not None
        self._thread.call(self._mend)
        self._mend = None

    def _module(self, name: str) -> Any:
        (model,) = self._vllm.llm.collective_rpc(_model)
        return model.get_submodule(name)

    def _tensor(self, name: str) -> torch.Tensor:
        module, _, leaf = name.rpartition(".")
        tensor: torch.Tensor = getattr(self._module(module), leaf)
        return tensor

    def _rope_base(self, name: str) -> Callable[[], object]:
        attention = self._module(name.rpartition(".")[0])
        own = attention.rotary_emb
        other = copy.deepcopy(own)
        other.base = own.base * 1.01
        other.cos_sin_cache = other._compute_cos_sin_cache().to(own.cos_sin_cache)
        attention.rotary_emb = other
        return lambda: setattr(attention, "rotary_emb", own)

    def _short_table(self, name: str) -> Callable[[], object]:
        """From position 40 on, the angles of position 39."""
        table = self._module(name).cos_sin_cache
        own = table.clone()
        table[40:] = table[39]
        return lambda: table.copy_(own)

    def _epsilon(self, name: str) -> Callable[[], object]:
        norm = self._module(name)
        own = norm.variance_epsilon
        norm.variance_epsilon = own * 1000
        return lambda: setattr(norm, "variance_epsilon", own)

    def _attention_scale(self, name: str) -> Callable[[], object]:
        attention = self._module(name).impl
        own = attention.scale
        attention.scale = own * 1.1
        return lambda: setattr(attention, "scale", own)

    def _window(self, name: str) -> Callable[[], object]:
        """The window has one position less."""
        attention = self._module(name).impl
        own = attention.sliding_window
        attention.sliding_window = own - 1
        return lambda: setattr(attention, "sliding_window", own)

    def _no_sinks(self, name: str) -> Callable[[], object]:
        attention = self._module(name).impl
        own = attention.sinks
        attention.sinks = torch.full_like(own, -torch.inf)
        return lambda: setattr(attention, "sinks", own)

    def _scaled(self, name: str) -> Callable[[], object]:
        """The tensor of this name, which is no weight of a linear layer, is another."""
        tensor = self._tensor(name)
        own = tensor.detach().clone()
        tensor.data.mul_(1.01)
        return lambda: tensor.data.copy_(own)

    def _zero(self, name: str) -> Callable[[], object]:
        tensor = self._tensor(name)
        own = tensor.detach().clone()
        tensor.data.zero_()
        return lambda: tensor.data.copy_(own)

    def _logit_scale(self, name: str) -> Callable[[], object]:
        self._module(name).scale = 1.01
        return lambda: setattr(self._module(name), "scale", 1.0)

    def _replaced(self, name: str, module: torch.nn.Module) -> Callable[[], object]:
        parent, _, leaf = name.rpartition(".")
        holder = self._module(parent)
        own = getattr(holder, leaf)
        setattr(holder, leaf, module)
        return lambda: setattr(holder, leaf, own)

    def _left_out(self, name: str) -> Callable[[], object]:
        """The module returns what it gets."""
        return self._replaced(name, torch.nn.Identity())

    def _gelu(self, name: str) -> Callable[[], object]:
        """The gate's activation is another."""
        return self._replaced(name, _GeluOfGate())

    def _swap(self, name: str) -> Callable[[], object]:
        layer = self._module(name)
        own = layer.quant_method
        layer.quant_method = _Swapped(own)
        return lambda: setattr(layer, "quant_method", own)

    def _bias_of_head_1(self, name: str) -> Callable[[], object]:
        layer = self._module(name)
        own = layer.bias.detach().clone()
        with torch.no_grad():
            layer.bias[layer.head_size : 2 * layer.head_size] = 0
        return lambda: layer.bias.data.copy_(own)

    def _stale(self, name: str) -> Callable[[], object]:
        """The tensor of this name comes as in the first transfer from now on."""
        own, first = WholeInMemory.receive, {}

        def receive(channel: WholeInMemory) -> Iterator[NamedTensors]:
            for tensors in own(channel):
                first.setdefault(name, dict(tensors)[name].clone())
                yield [(one, first[name] if one == name else tensor) for one, tensor in tensors]

        WholeInMemory.receive = receive  # type: ignore[method-assign]
        return lambda: setattr(WholeInMemory, "receive", own)

    def _transpose(self, name: str) -> Callable[[], object]:
        """The tensor of this name is loaded transposed."""
        return _loaded_as(
            lambda one, tensor: (one, tensor.T.contiguous() if one == name else tensor),
        )

    def _exchange(self, name: str) -> Callable[[], object]:
        """Experts 1 and 2 of this layer get each other's weights of this matrix."""
        names = [name.format(1), name.format(2)]
        other = dict(zip(names, reversed(names), strict=True))
        return _loaded_as(lambda one, tensor: (other.get(one, one), tensor))


class _GeluOfGate(torch.nn.Module):
    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return torch.nn.functional.gelu(gate) * up


def _loaded_as(change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> Callable[[], object]:
    """Let ``change`` see each tensor of experts that is loaded from now on; return what undoes it."""
    own = ExpertStacks.take

    def take(stacks: ExpertStacks, tensors: NamedTensors) -> NamedTensors:
        return own(stacks, [change(name, tensor) for name, tensor in tensors])

    ExpertStacks.take = take  # type: ignore[method-assign]
    return lambda: setattr(ExpertStacks, "take", own)


def _model(worker: Any) -> Any:
    return worker.get_model()


class FaultyWorker(TracedWorker):
    """Its faults are in the trainer's model."""

    def double_scaling(self, name: str) -> None:
        """Double the scaling of the adapter of the layer with this name."""
        backend: Any = self._backend
        backend._causal_lm.get_submodule(name).scaling["default"] *= 2
