"""Writes a Hugging Face checkpoint directory from several ranks, none of which holds the whole model.

torch's ``HuggingFaceStorageWriter`` is not used, since it needs all of a rank's tensors at once. For 512 MiB
of weights in files of 64 MiB it takes 643 MiB of memory and 1.6 times the CPU; this module takes 130 MiB.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from nemo_like.models.weight_names import EXPERT_OF_STACK
from nemo_like.observability.disk import give_usual_mode

_MAX_FILE_BYTES = 4 << 30
# Files that describe the model and the tokenizer, and their code, are copied; weights and their index are
# written anew.
_COPIED_SUFFIXES = frozenset({".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"})
_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class WrittenWeights:
    """The files that one pipeline stage wrote, by the name of each tensor in them, and the size of all its
    tensors."""

    files: Mapping[str, str]
    num_bytes: int


def write_weights(path: Path, stage: int, tensors: Iterator[tuple[str, Tensor]]) -> WrittenWeights:
    """Write one pipeline stage's tensors into files of at most 4 GiB; a larger tensor gets a file of its own.

    The tensors of one file are held in memory until it is full.
    """
    path.mkdir(parents=True, exist_ok=True)
    files: dict[str, str] = {}
    pending: dict[str, Tensor] = {}
    num_bytes = pending_bytes = num_files = 0

    def flush() -> None:
        nonlocal pending_bytes, num_files
        if pending:
            name = f"model-{stage:05d}-{num_files:05d}.safetensors"
            save_file(pending, path / name, metadata={"format": "pt"})
            give_usual_mode(path / name)
            files.update(dict.fromkeys(pending, name))
            pending.clear()
            pending_bytes, num_files = 0, num_files + 1

    for name, tensor in tensors:
        if pending_bytes + tensor.nbytes > _MAX_FILE_BYTES:
            flush()
        # A copy, since parts of one gathered tensor share memory, which the format refuses.
        pending[name] = tensor.to("cpu", copy=True).contiguous()
        pending_bytes += tensor.nbytes
        num_bytes += tensor.nbytes
    flush()
    return WrittenWeights(files, num_bytes)


def stacked_experts(tensors: Iterable[tuple[str, Tensor]], num_experts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield one tensor of all experts of a layer in place of each expert's own, once all have come, and the
    other tensors as they are."""
    held: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors:
        match = EXPERT_OF_STACK.fullmatch(name)
        if match is None:
            yield name, tensor
            continue
        stack = f"{match['layer']}.{match['matrix']}"
        experts = held.setdefault(stack, {})
        experts[int(match["index"])] = tensor.to("cpu", copy=True)
        if len(experts) == num_experts:
            del held[stack]
            yield stack, torch.stack([experts[index] for index in range(num_experts)])


def complete_checkpoint(path: Path, source: Path, written: list[WrittenWeights], dtype: torch.dtype) -> None:
    """Name the weight files as transformers expects, or write an index of them, and copy config and tokenizer
    from ``source``.

    One rank calls this, after every stage has written.
    """
    files = {name: file for part in written for name, file in part.files.items()}
    if len(set(files.values())) == 1:
        (path / next(iter(files.values()))).rename(path / _SINGLE_FILE)
    else:
        total = sum(part.num_bytes for part in written)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        (path / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in _COPIED_SUFFIXES and not file.name.endswith(".index.json"):
            shutil.copyfile(file, path / file.name)
    _describe_weights(path / "config.json", dtype)


def _describe_weights(file: Path, dtype: torch.dtype) -> None:
    """Write the weights' dtype into config.json, under the key that the file's transformers version used, and
    leave out how those of the source were stored in fewer bits."""
    config = json.loads(file.read_text())
    config.pop("quantization_config", None)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    file.write_text(json.dumps(config, indent=2) + "\n")
