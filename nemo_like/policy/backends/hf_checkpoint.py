"""Reads the tensors of a Hugging Face checkpoint directory, one at a time."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from nemo_like.models.model_info import VALUE_HEAD, config_of
from nemo_like.models.quantization import SCALE_SUFFIX, scaled_block


class HFCheckpoint:
    """The tensors of a safetensors checkpoint directory by name; each is read when it is asked for.

    A weight in 8 bits is multiplied by the scales of its blocks, and comes in float32.

    Raises FileNotFoundError when the directory has no safetensors weights, and KeyError, with an example of
    the names in it, when a tensor is missing.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._block = path, scaled_block(config_of(str(path)))
        index = path / "model.safetensors.index.json"
        if index.is_file():
            self._files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        elif (path / "model.safetensors").is_file():
            with safe_open(path / "model.safetensors", framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), "model.safetensors")
        else:
            raise FileNotFoundError(
                f"the checkpoint {path} holds neither model.safetensors nor model.safetensors.index.json; "
                "save the checkpoint with transformers' save_pretrained"
            )

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __getitem__(self, name: str) -> Tensor:
        stored, scales = self._stored(name), f"{name}{SCALE_SUFFIX}"
        if self._block is None or scales not in self._files:
            return stored
        return dequantised(stored, self._stored(scales), self._block)

    def names(self) -> list[str]:
        """Return the names of all tensors but scales."""
        return [name for name in self._files if not name.endswith(SCALE_SUFFIX)]

    def _stored(self, name: str) -> Tensor:
        if name not in self._files:
            raise KeyError(
                f"{self.path} has no tensor {name!r}; it has {len(self._files)}, e.g. {min(self._files)!r}"
            )
        with safe_open(self.path / self._files[name], framework="pt") as file:
            return file.get_tensor(name)


def dequantised(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiply each block of a weight [m, n] by its scale, and return the product in float32. The last blocks
    of rows and of columns may be smaller than ``block``."""
    rows, columns = block
    of_rows = scales.float().repeat_interleave(rows, dim=0)[: weight.shape[0]]
    return weight.float() * of_rows.repeat_interleave(columns, dim=1)[:, : weight.shape[1]]


def value_head(path: Path, hidden_size: int) -> Tensor:
    """Return the weight from which a critic's head starts, [1, hidden size] float32.

    It is the checkpoint's tensor score.weight, if the checkpoint is a reward model or a critic; else 0, so
    that every value is 0 at first. Raises ValueError for a head with several outputs, and what
    ``HFCheckpoint`` raises.
    """
    checkpoint = HFCheckpoint(path)
    if VALUE_HEAD not in checkpoint:
        return torch.zeros(1, hidden_size)
    weight = checkpoint[VALUE_HEAD].float()
    if weight.shape != (1, hidden_size):
        raise ValueError(
            f"{VALUE_HEAD} of {path} is {list(weight.shape)}, but a value head has one output for "
            f"{hidden_size} inputs, [1, {hidden_size}]; use a reward model with one label"
        )
    return weight
