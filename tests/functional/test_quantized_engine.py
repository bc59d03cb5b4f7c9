"""Engines that round their weights: what is asked of vLLM, and what they receive. No GPU runs one here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nemo_like.config.schema import Device, Precision, Quantization
from nemo_like.generation import weight_receiver
from nemo_like.generation.engine_args import engine_args
from nemo_like.generation.weight_receiver import TrainerWeightReceiver
from tests.functional.generation_fixtures import engine_kwargs, make_checkpoint


@pytest.mark.parametrize(
    ("quantization", "name"), [(None, None), (Quantization.fp8, "fp8_per_channel")], ids=["none", "fp8"]
)
def test_vllm_is_asked_to_round_weights_as_they_are_loaded(
    quantization: Quantization | None, name: str | None, tmp_path: Path
) -> None:
    generation = engine_kwargs(make_checkpoint(tmp_path, tied=True), "engine")["generation"]
    generation = replace(generation, vllm_cfg=replace(generation.vllm_cfg, quantization=quantization))
    asked = engine_args(str(tmp_path), generation, Device.cuda, Precision.bfloat16, 64, 0)
    assert asked.quantization == name


@pytest.mark.parametrize("quantization", ["fp8_per_channel", None])
def test_a_model_that_rounds_its_weights_makes_the_scales_itself(
    quantization: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_receiver, "finalize_layerwise_reload", lambda *_: None)
    receiver = TrainerWeightReceiver.__new__(TrainerWeightReceiver)
    receiver.model = torch.nn.ParameterDict({"weight": torch.ones(1), "weight_scale": torch.ones(1)})
    receiver.model_config = SimpleNamespace(quantization=quantization)
    receiver.device, receiver._channels, receiver._loaded = "meta", {}, {"weight"}
    if quantization is not None:
        receiver.finish_weight_update()
        receiver._loaded = set()
    with pytest.raises(RuntimeError, match="the trainer sent no weights for"):
        receiver.finish_weight_update()
