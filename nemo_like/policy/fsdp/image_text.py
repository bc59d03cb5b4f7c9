"""The FSDP backend's handling of transformers' models that read images: a vision tower and a language model.

pixels ──▶ vision tower ──▶ features of each image ──▶ at the places of images in the rows ──▶ language model
"""

from __future__ import annotations

from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from nemo_like.models.model_info import IMAGE_TEXT_MODEL_TYPES
from nemo_like.models.remote_code import loading_arguments
from nemo_like.policy.batch.image_inputs import RopeIndex
from nemo_like.policy.batch.policy_batch import ModelInputs


def reads_images(config: Any) -> bool:
    """Return whether a model of transformers with this configuration has a vision tower."""
    return config.model_type in IMAGE_TEXT_MODEL_TYPES


def auto_class(config: Any) -> Any:
    """Return transformers' class that builds and loads models with this configuration."""
    return AutoModelForImageTextToText if reads_images(config) else AutoModelForCausalLM


def load_model(path: Path) -> PreTrainedModel:
    """Load a checkpoint's whole model on the host, in the checkpoint's dtype."""
    arguments = loading_arguments()
    config = AutoConfig.from_pretrained(path, **arguments)
    return auto_class(config).from_pretrained(path, dtype="auto", **arguments)


def freeze_vision_tower(model: PreTrainedModel) -> None:
    """Exclude the parameters of the vision tower from training."""
    model.model.visual.requires_grad_(False)


def check_takes_features(model: PreTrainedModel) -> None:
    """Raise ImportError where the model would compute as if there were no images, as those of transformers
    before 5.19 do: they pass over an argument that they do not know."""
    if "mm_encoder_outputs" not in signature(model.model.forward).parameters:
        raise ImportError(
            f"{type(model).__name__} of transformers {transformers.__version__} takes no features of images "
            "that were computed before; install transformers 5.19"
        )


def image_rope_index(model: PreTrainedModel) -> RopeIndex:
    """Return the model's own function that computes the positions of a sample's tokens from its tokens and
    images."""
    image_token = model.config.image_token_id

    def rope_index(input_ids: Tensor, grids: Tensor) -> tuple[Tensor, Tensor]:
        kinds = (input_ids == image_token).int()  # 0: text, 1: image
        return model.model.get_rope_index(input_ids, kinds, image_grid_thw=grids)

    return rope_index


def hidden_states(model: PreTrainedModel, inputs: ModelInputs, arguments: dict[str, Any]) -> Tensor:
    """Compute the last hidden states of a micro-batch, [B, T, hidden size].

    ``arguments`` go to the language model's layers.
    """
    images = inputs.images
    if images is not None:
        features = _features(model, images.pixel_values, images.grids, images.order)
    else:
        # All ranks of FSDP must gather and reduce the tower's parameters at the same points, and other ranks
        # may have images. So the tower computes here too, on an empty image whose features count 0 times.
        features = _features(model, *_no_image(model, inputs.input_ids.device), (0,))
    hidden: Tensor = model.model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        use_cache=False,
        mm_encoder_outputs={"image": None if images is None else features},
        **arguments,
    ).last_hidden_state
    if images is None:
        layers = [features.pooler_output, *(getattr(features, "deepstack_features", None) or ())]
        hidden = hidden + 0.0 * sum(layer[0].sum() for layer in layers)
    return hidden


def _features(model: PreTrainedModel, pixels: Tensor, grids: Tensor, order: tuple[int, ...]) -> Any:
    """Return the vision tower's features of distinct images, in ``order`` and in the form that the model
    takes."""
    seen = model.model.get_image_features(pixels, grids, return_dict=True)
    seen.pooler_output = [seen.pooler_output[image] for image in order]
    if getattr(seen, "deepstack_features", None) is not None:
        seen.deepstack_features = [[layer[image] for image in order] for layer in seen.deepstack_features]
    return seen


def _no_image(model: PreTrainedModel, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the patches, [merged patches, values], and the grid, [1, 3], of the smallest image."""
    cfg = model.config.vision_config
    side = cfg.spatial_merge_size
    values = cfg.in_channels * cfg.temporal_patch_size * cfg.patch_size**2
    return torch.zeros(side * side, values, device=device), torch.tensor([[1, side, side]], device=device)
