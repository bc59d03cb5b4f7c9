"""Reads some weights back from a checkpoint that has just been written, and compares them with the live ones.

Norms' weights are small, and any update changes them. Both formats store a vector whole, under its own name;
vectors that Megatron-core stores as one tensor for all layers are not looked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

_MOST_VECTORS = 4
_MOST_ELEMENTS = 2**16


def vectors(weights: Sequence[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return copies of some of a rank's weights of one dimension, by name."""
    chosen = [(name, one) for name, one in weights if one.dim() == 1 and 0 < len(one) <= _MOST_ELEMENTS]
    return {name: one.detach().to("cpu", copy=True) for name, one in chosen[-_MOST_VECTORS:]}


def check_stored(path: Path, live: Mapping[str, Tensor]) -> None:
    """Raise RuntimeError when the checkpoint in ``path`` has other values for vectors than ``live``."""
    if wrong := unlike_stored(path, live):
        raise RuntimeError(
            f"tripwire 'stored_weights': the checkpoint has other {', '.join(wrong)} than the model "
            "had when it was saved; look at what its writer is given (policy/megatron/checkpoint.py, "
            "policy/fsdp/checkpoint.py). debug.tripwires=off turns the tripwires off"
        )


def unlike_stored(path: Path, live: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the vectors that the checkpoint in ``path`` has with other values. A rank's part of
    a vector may be any of its equal pieces, or the last."""
    reader = torch_checkpoint.FileSystemReader(path)
    stored = reader.read_metadata().state_dict_metadata
    wanted: dict[str, tuple[str, Tensor]] = {}
    for name in live:
        # Megatron-core numbers the layers of each stage anew, and the stored ones in the whole model.
        of_stage = () if ".layers." in name else (name.partition(".")[2],)
        for key in (f"model.{name}", *of_stage):
            found = stored.get(key)
            if isinstance(found, TensorStorageMetadata) and len(found.size) == 1:
                wanted[key] = name, torch.empty(found.size, dtype=found.properties.dtype)
    if not wanted:
        return []
    state = {key: whole for key, (_, whole) in wanted.items()}
    torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    return [name for key, (name, _) in wanted.items() if not _has_part(state[key], live[name])]


def _has_part(whole: Tensor, part: Tensor) -> bool:
    size = len(part)
    pieces = [*(whole[start : start + size] for start in range(0, len(whole), size)), whole[-size:]]
    return any(torch.equal(piece, part) for piece in pieces)
