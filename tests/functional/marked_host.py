"""A host and a GPU on a machine that has no GPU: which tensors are on the host is only marked."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode


class MarkedHost(TorchFunctionMode):
    """Within this context every tensor says that it is on a GPU, except one that was pinned, and what is
    computed from it: these are on the host."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func == Tensor.is_cuda.__get__:
            return not is_marked(args[0])
        if func is Tensor.pin_memory:
            return _mark(args[0])
        result = func(*args, **(kwargs or {}))
        if args and is_marked(args[0]) and isinstance(result, Tensor):
            _mark(result)
        return result


def is_marked(value: Any) -> bool:
    return isinstance(value, Tensor) and getattr(value, "is_on_host", False)


def _mark(tensor: Any) -> Any:
    tensor.is_on_host = True
    return tensor
