"""Keeps weights on the host and puts them into the model while it scores: the weights of the reference
policy, and of a teacher's further checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nemo_like.policy.backends.parking import HostMemory
from nemo_like.policy.options import ReferencePlacement


class KeptWeights:
    """A host copy of the values that ``parameters()`` has at construction.

    The values are put into the model's own parameters while it scores, so the device never holds a second
    model.
    """

    def __init__(self, parameters: Callable[[], Sequence[Tensor]], placement: ReferencePlacement) -> None:
        self._parameters = parameters
        self._held = _HeldValues(parameters())
        self._held.take(parameters())
        keeps_own = placement is ReferencePlacement.host_copy
        self._own = _HeldValues(parameters()) if keeps_own else None

    @property
    def held(self) -> Sequence[Tensor]:
        """The kept weights on the host, in the order of the parameters."""
        return self._held.values

    def take(self) -> None:
        """Keep the values that the parameters have now."""
        self._held.take(self._parameters())

    @torch.no_grad()
    def mix(self, weight: float) -> None:
        """Replace each kept value by ``weight`` times the parameter plus (1 - ``weight``) times itself."""
        for parameter, held in zip(self._parameters(), self.held, strict=True):
            held.lerp_(parameter.detach().to(held.device), weight)

    @contextlib.contextmanager
    def in_model(self) -> Iterator[None]:
        """Give the parameters the kept values within the block, and their own values after it."""
        parameters = self._parameters()
        if self._own is not None:
            self._own.take(parameters)
            try:
                self._held.give(parameters)
                yield
            finally:
                self._own.give(parameters)
            return
        num_swapped = 0
        try:
            for parameter, held in zip(parameters, self.held, strict=True):
                _swap(parameter, held)
                num_swapped += 1
            _wait_for_copies(parameters)
            yield
        finally:
            for parameter, held in zip(parameters[:num_swapped], self.held, strict=False):
                _swap(parameter, held)
            _wait_for_copies(parameters)


def reference_in_model(reference: KeptWeights | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the model has the reference's weights. Raises RuntimeError when the run keeps
    no reference."""
    if reference is None:
        raise RuntimeError("loss_fn.reference_policy_kl_penalty=0 keeps no reference policy; set it above 0")
    return reference.in_model()


class _HeldValues:
    """Values of a model's parameters on the host."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        """Allocate host memory for the values; ``take`` fills it."""
        sizes = [parameter.nbytes for parameter in parameters]
        self._memory = HostMemory(sizes, is_pinned=any(parameter.is_cuda for parameter in parameters))
        self.values = [
            piece.view(parameter.dtype).view(parameter.shape)
            for piece, parameter in zip(self._memory.pieces, parameters, strict=True)
        ]

    @torch.no_grad()
    def take(self, parameters: Sequence[Tensor]) -> None:
        for parameter, value in zip(parameters, self.values, strict=True):
            value.copy_(parameter, non_blocking=True)
        _wait_for_copies(parameters)

    @torch.no_grad()
    def give(self, parameters: Sequence[Tensor]) -> None:
        for parameter, value in zip(parameters, self.values, strict=True):
            parameter.copy_(value, non_blocking=True)


@torch.no_grad()
def _swap(parameter: Tensor, held: Tensor) -> None:
    """Swap the values of ``parameter`` and ``held``, with memory for one more tensor on the parameter's
    device. A GPU runs the copies later, in their order."""
    own = parameter.detach().clone()
    parameter.copy_(held, non_blocking=True)
    held.copy_(own, non_blocking=True)


def _wait_for_copies(parameters: Sequence[Tensor]) -> None:
    """Wait until a GPU's copies to and from the host are complete."""
    if any(parameter.is_cuda for parameter in parameters):
        torch.cuda.current_stream().synchronize()
