"""A shim by which Megatron-core runs on the CPU although its code says "cuda". It is used only when
policy.device is cpu.

It has two parts. Once per process, a few functions of ``torch.cuda`` (current device, streams, random state)
are replaced by CPU counterparts. Within ``cuda_means_cpu``, the literal device "cuda" in any torch call
becomes "cpu".

Private parts: ``torch._C.DisableTorchFunction`` of torch 2.13.0, and functions of megatron-core 0.16.1 that
are replaced. Megatron-core's callers can choose layers, but no device. This module can go with a
Megatron-core that takes a device.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites device arguments from "cuda" to "cpu"; costs a Python call per torch function while active."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            # Megatron-core compares the name of the type with "torch.cuda.FloatTensor".
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **(kwargs or {}))


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return bool(device.type == "cuda")
    return isinstance(device, str) and device.startswith("cuda")


class _InlineStream:
    """A stream, or an event on it, on which everything has already happened."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, *args: Any) -> _InlineStream:
        return self

    def wait(self, *args: Any) -> None: ...

    def record(self, *args: Any) -> None: ...

    def synchronize(self) -> None: ...


@contextlib.contextmanager
def cuda_means_cpu() -> Iterator[None]:
    """Give torch calls that ask for "cuda" the CPU within the block. The first call also replaces the
    functions of ``torch.cuda``, for good."""
    _install()
    with _CudaMeansCpu():
        yield


def plain_torch() -> contextlib.AbstractContextManager[None]:
    """Suspend ``cuda_means_cpu`` within the block, for code that never says "cuda" and need not pay for
    the rewriting."""
    context: contextlib.AbstractContextManager[None] = torch._C.DisableTorchFunction()
    return context


@functools.cache
def _install() -> None:
    """Replace functions of ``torch.cuda`` and Megatron-core that Megatron-core calls on any device."""
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    def get_state(*args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        torch.set_rng_state(state)

    run_backward = schedules.custom_backward

    def plain_backward(*args: Any, **kwargs: Any) -> None:
        with plain_torch():
            run_backward(*args, **kwargs)

    torch.cuda.current_device = lambda: _CPU
    torch.cuda.synchronize = lambda *args, **kwargs: None
    torch.cuda.empty_cache = lambda: None
    torch.cuda.manual_seed = torch.manual_seed
    torch.cuda.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state
    torch.cuda.Stream = torch.cuda.Event = _InlineStream
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *args: _InlineStream()
    torch.cuda.stream = lambda stream: contextlib.nullcontext()
    schedules.custom_backward = plain_backward
    token_dispatcher.maybe_move_tensor_to_cpu = _on_host
    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state
    logging.getLogger(megatron_random.__name__).addFilter(_is_not_rng_notice)


def _is_not_rng_notice(record: logging.LogRecord) -> bool:
    """Return False for Megatron-core's notice that the CPU's random state changed: on CPUs Megatron-core
    tracks that very state, so the notice says nothing."""
    return "CPU RNG state changed" not in record.getMessage()


def _on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Stand in for Megatron-core's function, which converts only tensors of a GPU to numpy."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
