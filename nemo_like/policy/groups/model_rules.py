"""Rules on the model of a worker group: how it is divided over ranks, how long its sequences are, images,
and modules that are imported for it."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.data.options import DataConfig
from nemo_like.data.sources import data_sources
from nemo_like.models.division import must_divide
from nemo_like.models.model_info import IMAGE_TEXT_MODEL_TYPES, ModelInfo
from nemo_like.policy.backends.backend_kind import axis_size, backend_kind_of
from nemo_like.policy.groups.adapter_rules import adapted_expert_problems
from nemo_like.policy.groups.layout import adapters_of
from nemo_like.policy.options import PolicyConfig, WorkerGroupConfig


def context_length_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem when sequences may be longer than the model has positions."""
    length = group.max_total_sequence_length
    if length > model.max_position_embeddings:
        yield Problem(
            key=f"{name}.max_total_sequence_length={length}",
            rule=f"must be at most the model's max_position_embeddings={model.max_position_embeddings}",
            remedy="shorten the sequences or use a model with a longer context",
        )


def layout_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem for every size of the group's layout that does not divide its model."""
    kind = backend_kind_of(group)
    parts = {"attention heads": model.num_heads, "key-value heads": model.num_kv_heads}
    if ffn_size := model.dense_ffn_size if model.num_experts else model.intermediate_size:
        parts["FFN columns"] = ffn_size
    if model.shared_ffn_size:
        parts["columns of shared experts"] = model.shared_ffn_size
    if "tp" in kind.axes:
        yield from must_divide(f"{name}.{kind.axes['tp']}", axis_size(group, "tp"), parts)
    if model.num_experts is not None and (lora := adapters_of(group)) is not None:
        yield from adapted_expert_problems(name, lora)
    if kind.model_problems is not None:
        yield from kind.model_problems(name, group, model)


def external_lib_problems(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem for each module of ``policy.external_lib`` whose name no import could have."""
    for index, name in enumerate(policy.external_lib):
        if name.endswith(".py") or not all(part.isidentifier() for part in name.split(".")):
            yield Problem(
                key=f"policy.external_lib[{index}]={name}",
                rule="must be the name of a module, which Python finds beside the configuration, on "
                "PYTHONPATH or among the installed packages",
                remedy="write package.module, without a folder and without .py",
            )


def image_problems(policy: PolicyConfig, data: DataConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield every problem of a model that reads images with other keys, or of images in the data of a model
    that reads none."""
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
