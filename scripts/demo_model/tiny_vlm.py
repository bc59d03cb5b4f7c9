"""A tiny vision-language model of Qwen's architectures, with the files that engine and trainer load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2_5_VLConfig, Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from .shapes import SIDE
from .tiny_tokenizer import EOS, PAD, VOCABULARY_SIZE, save_tokenizer, vocabulary

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_START, _END, _IMAGE, _VIDEO = VISION_TOKENS
PATCH, MERGE = 14, 2  # a picture of 56 x 56 pixels takes 4 tokens
_MEAN_AND_STD = [0.5, 0.5, 0.5]
_PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}


def tiny_vlm_config(architecture: str = "qwen2_5_vl") -> Any:
    """Return the configuration of a model of about 0.7M parameters, ``qwen2_5_vl`` or ``qwen3_vl``."""
    ids = vocabulary(VISION_TOKENS)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text: dict[str, Any] = {
        "vocab_size": VOCABULARY_SIZE,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
        "bos_token_id": None,
        "eos_token_id": ids[EOS],
        "pad_token_id": ids[PAD],
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
    }
    common = {
        "tie_word_embeddings": True,
        "image_token_id": ids[_IMAGE],
        "video_token_id": ids[_VIDEO],
        "vision_start_token_id": ids[_START],
        "vision_end_token_id": ids[_END],
        "dtype": torch.float32,
    }
    if architecture == "qwen2_5_vl":
        vision |= {"window_size": 8 * PATCH, "fullatt_block_indexes": [0, 1]}
        return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **common)
    rope["mrope_interleaved"] = True
    text["head_dim"] = 32
    vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config=text, vision_config=vision, **common)


def save_vlm(model: PreTrainedModel, directory: Path) -> None:
    """Write the model with its tokenizer and its image processor."""
    model.generation_config.eos_token_id = model.config.text_config.eos_token_id
    model.generation_config.pad_token_id = model.config.text_config.pad_token_id
    model.save_pretrained(directory)
    save_tokenizer(directory, VISION_TOKENS)
    image_processor().save_pretrained(directory)
    file = directory / "preprocessor_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    content["processor_class"] = _PROCESSORS[model.config.model_type]
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def image_processor() -> Qwen2VLImageProcessorPil:
    """Return what turns a picture of at most ``SIDE`` x ``SIDE`` pixels into patches."""
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH,
        merge_size=MERGE,
        temporal_patch_size=2,
        size={"shortest_edge": (MERGE * PATCH) ** 2, "longest_edge": SIDE * SIDE},
        image_mean=_MEAN_AND_STD,
        image_std=_MEAN_AND_STD,
    )
