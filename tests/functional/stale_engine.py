"""An engine on which one weight stays what it was: mistakes of a weight update that raise nothing.

``STALE`` in the environment says which: a part of a tensor's name keeps the first values that came,
"lm_head" is the packed copy of a tied output layer that is not packed again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from nemo_like.generation.vllm_engine import VllmEngine
from nemo_like.generation.weight_channels import NamedTensors, WholeInMemory
from nemo_like.generation.weight_receiver import TrainerWeightReceiver


class StaleEngine(VllmEngine):
    """To be hosted in the place of ``VllmEngine``, whose worker is in the same process."""


_first: dict[str, torch.Tensor] = {}
_receive = WholeInMemory.receive


def receive(self: WholeInMemory) -> Iterator[NamedTensors]:
    """What was sent, but for the stale tensors."""
    for tensors in _receive(self):
        stale = {name: tensor for name, tensor in tensors if os.environ["STALE"] in name}
        for name, tensor in stale.items():
            _first.setdefault(name, tensor.clone())
        yield [(name, _first[name] if name in stale else tensor) for name, tensor in tensors]


def leave_packed(self: TrainerWeightReceiver) -> None:
    """Pack nothing again."""


if os.environ["STALE"] == "lm_head":
    TrainerWeightReceiver._repack_tied_output_layer = leave_packed  # type: ignore[method-assign]
else:
    WholeInMemory.receive = receive  # type: ignore[method-assign]
