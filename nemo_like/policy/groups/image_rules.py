"""Rules on images: which models read them, and which keys go with such a model."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.data.options import DataConfig
from nemo_like.data.sources import data_sources
from nemo_like.models.model_info import IMAGE_TEXT_MODEL_TYPES, ModelInfo
from nemo_like.policy.backends.backend_kind import axis_size, backend_kind_of
from nemo_like.policy.options import PolicyConfig


def image_problems(policy: PolicyConfig, data: DataConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield every problem with a model that reads images, or with images for a model that reads none."""
    if model.has_vision_tower:
        yield from _with_vision_tower(policy)
        return
    rule = f"needs a model with a vision tower, and {policy.model_name} is of type {model.model_type!r}"
    for key, source in data_sources(data):
        if source.images_key is not None:
            yield Problem(
                key=f"{key}.images_key={source.images_key}",
                rule=rule,
                remedy=f"set it to null, or use a model of type {' or '.join(IMAGE_TEXT_MODEL_TYPES)}",
            )
    if policy.freeze_vision_tower:
        yield Problem(key="policy.freeze_vision_tower=true", rule=rule, remedy="set it to false")


def _with_vision_tower(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem for each set key that a model with a vision tower does not support."""
    rule = "is not for a model with a vision tower"
    for axis, key in backend_kind_of(policy).axes.items():
        if (size := axis_size(policy, axis)) > 1:
            yield Problem(key=f"policy.{key}={size}", rule=rule, remedy="set it to 1")
    if policy.lora.enabled:
        remedy = "set it to false; policy.freeze_vision_tower=true trains the language model alone"
        yield Problem(key="policy.lora.enabled=true", rule=rule, remedy=remedy)
