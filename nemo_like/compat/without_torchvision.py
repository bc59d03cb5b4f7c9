"""Makes vLLM serve models that read images where torchvision cannot be imported, as with builds for CPUs.

torchvision's published builds need CUDA. Only videos need torchvision, and no run has any: for images,
transformers has processors that use Pillow.

Private parts: processing classes of vllm 0.32.0 and processors of transformers 5.19.0, methods of which are
replaced. Neither has an option for a processor without videos. This module can go with versions that serve
images without torchvision, or once torchvision is installed everywhere.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any


@functools.cache
def lacks_torchvision() -> bool:
    """Return whether torchvision cannot be imported."""
    try:
        importlib.import_module("torchvision")
    except Exception:  # a build for other devices raises OSError or RuntimeError
        return True
    return False


def _patch_processors() -> None:
    """Let transformers make and load processors of images and text that have no part for videos."""
    from transformers import Qwen2_5_VLProcessor, Qwen3VLProcessor

    of_images = classmethod(lambda cls: ["image_processor", "tokenizer"])
    Qwen2_5_VLProcessor.get_attributes = of_images
    Qwen3VLProcessor.get_attributes = of_images


def patch_vllm() -> None:
    """Let vLLM in this process serve models for images and text alone.

    Call this before the engine is made.
    """
    _patch_processors()
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
        smart_resize,
    )
    from vllm import ModelRegistry

    _add_module(
        "transformers.models.qwen2_vl.image_processing_qwen2_vl",
        smart_resize=smart_resize,
        Qwen2VLImageProcessor=Qwen2VLImageProcessorPil,
    )
    _add_module(
        "transformers.models.qwen3_vl.video_processing_qwen3_vl",
        smart_resize=None,
        Qwen3VLVideoProcessor=type("Qwen3VLVideoProcessor", (), {}),
    )
    # These import the modules that were just added.
    from vllm.model_executor.models.qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from vllm.model_executor.models.qwen2_vl import Qwen2VLProcessingInfo
    from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration, Qwen3VLProcessingInfo

    # Without this the engine asks for the size of the largest video, and for the processor of videos.
    for info in (Qwen2VLProcessingInfo, Qwen3VLProcessingInfo):
        info.get_supported_mm_limits = lambda self: {"image": None}
        info.get_mm_max_tokens_per_item = lambda self, seq_len, mm_counts: {
            "image": self.get_max_image_tokens()
        }
    Qwen3VLProcessingInfo.get_supported_mm_processor_kwargs = (
        Qwen2VLProcessingInfo.get_supported_mm_processor_kwargs
    )
    # A class that is registered as an object is not inspected in another process, where nothing is patched.
    for model in (Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration):
        ModelRegistry.register_model(model.__name__, model)


def _add_module(name: str, **contents: Any) -> None:
    """Let ``import name`` find a module with these contents, unless it was imported before."""
    if name not in sys.modules:
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
