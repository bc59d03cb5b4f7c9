"""Reads the tensors of a Hugging Face checkpoint directory, one at a time.

A checkpoint of gpt-oss has one tensor of all experts of a layer, or two in MXFP4. A single expert's part is
asked for by a name with its number: ``mlp.experts.3.down_proj`` is a part of ``mlp.experts.down_proj``.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from nemo_like.models.model_info import VALUE_HEAD, config_of
from nemo_like.models.quantization import SCALE_SUFFIX, scaled_block
from nemo_like.models.weight_names import EXPERT_OF_STACK
from nemo_like.policy.backends.mxfp4 import from_mxfp4

# What follows the name of a stack of experts in MXFP4, in the names of its two tensors.
_BLOCKS, _SCALES = "_blocks", "_scales"


class HFCheckpoint:
    """The tensors of a safetensors checkpoint directory by name; each is read when it is asked for.

    A weight in 8 bits is multiplied by the scales of its blocks, and comes in float32; one in MXFP4 comes in
    bfloat16, which holds its values.

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
        expert = EXPERT_OF_STACK.fullmatch(name)
        if expert is not None and name not in self._files:
            stack, index = f"{expert['layer']}.{expert['matrix']}", int(expert["index"])
            if stack in self._files:
                return self._stored(stack, index)
            if f"{stack}{_BLOCKS}" in self._files:
                return self._of_mxfp4(stack, index)
        if f"{name}{_BLOCKS}" in self._files:
            num_experts = len(self._stored(f"{name}{_SCALES}"))
            return torch.stack([self._of_mxfp4(name, index) for index in range(num_experts)])
        stored, scales = self._stored(name), f"{name}{SCALE_SUFFIX}"
        if self._block is None or scales not in self._files:
            return stored
        return dequantised(stored, self._stored(scales), self._block)

    def names(self) -> list[str]:
        """Return the names of all tensors but scales."""
        scales = {f"{name.removesuffix(_BLOCKS)}{_SCALES}" for name in self._files if name.endswith(_BLOCKS)}
        others = [name for name in self._files if name not in scales and not name.endswith(SCALE_SUFFIX)]
        return [name.removesuffix(_BLOCKS) for name in others]

    def has_scales(self, name: str) -> bool:
        """Return whether a tensor is stored in fewer than 16 bits."""
        return not {f"{name}{SCALE_SUFFIX}", f"{name}{_SCALES}"}.isdisjoint(self._files)

    def _of_mxfp4(self, stack: str, index: int) -> Tensor:
        blocks, scales = (self._stored(f"{stack}{part}", index) for part in (_BLOCKS, _SCALES))
        return from_mxfp4(blocks, scales).t()

    def _stored(self, name: str, index: int | None = None) -> Tensor:
        """Read a tensor as it is stored, or its part at one index of its first axis."""
        if name not in self._files:
            raise KeyError(
                f"{self.path} has no tensor {name!r}; it has {len(self._files)}, e.g. {min(self._files)!r}"
            )
        with safe_open(self.path / self._files[name], framework="pt") as file:
            read: Tensor = file.get_tensor(name) if index is None else file.get_slice(name)[index]
            return read


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
