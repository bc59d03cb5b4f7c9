"""Weights that are kept on the host and put into the model while it scores: those of the reference policy,
and those of a teacher's further checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from nemo_like.config.schema import ReferencePlacement


class KeptWeights:
    """A host copy of the values that ``parameters()`` has at construction.

    They are put into the model's own parameters while it scores, so the device never holds a second model.
    """

    def __init__(self, parameters: Callable[[], Sequence[Tensor]], placement: ReferencePlacement) -> None:
        self._parameters, self._placement = parameters, placement
        self._held = _copies_on_host(parameters())

    @property
    def held(self) -> Sequence[Tensor]:
        """The kept weights on the host, in the order of the parameters."""
        return self._held

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Give the parameters the kept values within the block, and their own values after it."""
        parameters = self._parameters()
        if self._placement is ReferencePlacement.host_copy:
            own = _copies_on_host(parameters)
            try:
                _assign(parameters, self._held)
                yield
            finally:
                _assign(parameters, own)
            return
        num_swapped = 0
        try:
            for parameter, held in zip(parameters, self._held, strict=True):
                _swap(parameter, held)
                num_swapped += 1
            yield
        finally:
            for parameter, held in zip(parameters[:num_swapped], self._held, strict=False):
                _swap(parameter, held)


def reference_in_place(reference: KeptWeights | None) -> contextlib.AbstractContextManager[None]:
    """Return a context in which the model has the reference's weights. Raises RuntimeError when the run
    keeps no reference."""
    if reference is None:
        raise RuntimeError("loss_fn.reference_policy_kl_penalty=0 keeps no reference policy; set it above 0")
    return reference.in_place()


def _copies_on_host(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [parameter.detach().to("cpu", copy=True) for parameter in parameters]


@torch.no_grad()
def _assign(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def _swap(parameter: Tensor, held: Tensor) -> None:
    own = parameter.detach().to("cpu", copy=True)
    parameter.copy_(held)
    held.copy_(own)
