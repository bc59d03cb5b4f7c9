"""An engine that loads given weights in two ways: as weights that are sent, and tensor by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config

from nemo_like.generation import weight_receiver
from nemo_like.generation.expert_stacks import ExpertStacks
from nemo_like.generation.vllm_engine import VllmEngine
from tests.functional.digesting_engine import _model_digest

NUM_PARTS = 7


class ExpertLoadingEngine(VllmEngine):
    """To be hosted in the place of ``VllmEngine``."""

    def load(
        self, checkpoint: str, seed: int, *, one_by_one: bool = False, without: str = "nothing"
    ) -> tuple[list[str], int]:
        """Load the checkpoint's weights, moved at random; return each worker's digest of its model, and how
        many tensors its loader was given one by one."""
        arguments = (checkpoint, seed, one_by_one, without)
        loaded = self._thread.call(lambda: self._vllm.llm.collective_rpc(_load, args=arguments))
        return [digest for digest, _ in loaded], loaded[0][1]


class OneByOne(ExpertStacks):
    """Takes no tensor, so that vLLM's loader gets them all."""

    def take(self, tensors: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
        return tensors


def _load(worker: Any, checkpoint: str, seed: int, one_by_one: bool, without: str) -> tuple[str, int]:
    model, receiver = worker.get_model(), worker.weight_receiver
    parts = _parts(checkpoint, seed, without)
    taken = OneByOne if one_by_one else ExpertStacks
    single: list[int] = []
    load_weights = type(model).load_weights

    def counted(self: Any, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        single.append(len(tensors))
        return load_weights(self, tensors)

    with (
        patch.object(weight_receiver, "ExpertStacks", taken),
        patch.object(receiver, "_received", lambda group: iter(parts)),
        patch.object(type(model), "load_weights", counted),
        set_current_vllm_config(worker.vllm_config),
    ):
        receiver._load_model(["pp0"])
    return _model_digest(worker), sum(single)


def _parts(checkpoint: str, seed: int, without: str) -> list[list[tuple[str, torch.Tensor]]]:
    """Return the tensors in parts that tear layers apart, and experts of a layer out of their order."""
    generator = torch.Generator().manual_seed(seed)
    values = load_file(Path(checkpoint) / "model.safetensors")
    moved = [
        (name, values[name] + torch.randn(values[name].shape, generator=generator)) for name in sorted(values)
    ]
    kept = [named for named in moved if named[0] != without]
    return [kept[start::NUM_PARTS] for start in reversed(range(NUM_PARTS))]
