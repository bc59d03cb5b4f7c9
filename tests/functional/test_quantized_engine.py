"""Engines that round their weights: what is asked of vLLM, and what they receive. No GPU runs one here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_like.generation import weight_receiver
from nemo_like.generation.engine_args import engine_args
from nemo_like.generation.options import Quantization
from nemo_like.generation.weight_receiver import TrainerWeightReceiver
from nemo_like.policy.options import Device
from tests.functional.generation_fixtures import engine_kwargs, make_checkpoint


@pytest.mark.parametrize(
    ("quantization", "name"), [(None, None), (Quantization.fp8, "fp8_per_channel")], ids=["none", "fp8"]
)
def test_vllm_is_asked_to_round_weights_as_they_are_loaded(
    quantization: Quantization | None, name: str | None, tmp_path: Path
) -> None:
    spec = engine_kwargs(make_checkpoint(tmp_path, tied=True), "engine")["spec"]
    vllm = replace(spec.generation.vllm_cfg, quantization=quantization)
    asked = engine_args(replace(spec, device=Device.cuda, generation=replace(spec.generation, vllm_cfg=vllm)))
    assert asked.quantization == name


class Model(torch.nn.ParameterDict):
    """A model with a weight and a scale, which takes every tensor that comes."""

    def load_weights(self, tensors: list[tuple[str, torch.Tensor]]) -> set[str]:
        return {name for name, _ in tensors}


@pytest.mark.parametrize("quantization", ["fp8_per_channel", None])
def test_a_model_that_rounds_its_weights_makes_the_scales_itself(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        monkeypatch.setattr(weight_receiver, name, lambda *_: None)
    model = Model({"weight": torch.ones(1), "weight_scale": torch.ones(1)})
    vllm_config = SimpleNamespace(model_config=SimpleNamespace(quantization=quantization))
    receiver = TrainerWeightReceiver(model, vllm_config, 0, torch.device("cpu"))

    def load(*names: str) -> None:
        tensors = [(name, torch.ones(1)) for name in names]
        monkeypatch.setattr(receiver, "_received", lambda group: iter([tensors]))
        receiver._load_model(["pp0"])

    if quantization is not None:
        load("weight")
    with pytest.raises(RuntimeError, match="the trainer sent no weights for"):
        load() if quantization is not None else load("weight")
    load("weight", "weight_scale")
