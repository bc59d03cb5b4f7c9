"""Images need a model that reads them, and such a model needs some keys to be as they are by default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.configuration import Config
from nemo_like.models.model_info import ModelInfo, read_model_info
from nemo_like.policy.groups.model_rules import image_problems

Demo = Callable[..., Config]


@pytest.fixture
def of_text(checkpoint: Path) -> ModelInfo:
    return read_model_info(str(checkpoint), "fsdp")


def problems(cfg: Config, model: ModelInfo) -> list[str]:
    return [str(problem) for problem in image_problems(cfg.policy, cfg.data, model)]


def test_images_for_a_model_of_text_are_an_error_before_anything_starts(
    demo: Demo, of_text: ModelInfo
) -> None:
    cfg = demo(
        "data.train={kind: jsonl, path: a.jsonl, images_key: images}", "policy.freeze_vision_tower=true"
    )
    images, frozen = problems(cfg, of_text)
    assert images.startswith("data.train.images_key=images needs a model with a vision tower, and ")
    assert images.endswith("of type 'qwen3'; set it to null, or use a model of type qwen2_5_vl or qwen3_vl")
    assert frozen.startswith("policy.freeze_vision_tower=true needs a model with a vision tower")


def test_a_model_with_a_vision_tower_refuses_what_it_was_not_made_for(demo: Demo, of_text: ModelInfo) -> None:
    model = replace(of_text, model_type="qwen3_vl")
    assert problems(demo("policy.freeze_vision_tower=true"), model) == []
    cfg = demo("policy=fsdp", "policy.fsdp_cfg.tensor_parallel_size=2", "policy.lora.enabled=true")
    parallel, lora = problems(cfg, model)
    assert parallel == (
        "policy.fsdp_cfg.tensor_parallel_size=2 is not for a model with a vision tower; set it to 1"
    )
    assert "policy.freeze_vision_tower=true trains the language model alone" in lora
