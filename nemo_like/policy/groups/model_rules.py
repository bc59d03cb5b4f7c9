"""Rules on the model of a worker group: how it is divided over ranks, and how long its sequences are."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.models.division import must_divide
from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.backends.backend_kind import axis_size, backend_kind_of
from nemo_like.policy.options import WorkerGroupConfig


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
    if model.num_experts is None:
        parts["FFN columns"] = model.intermediate_size
    for axis, divided in {"tp": parts, "pp": {"layers": model.num_layers}}.items():
        if axis in kind.axes:
            yield from must_divide(f"{name}.{kind.axes[axis]}", axis_size(group, axis), divided)
    if kind.model_problems is not None:
        yield from kind.model_problems(name, group, model)
