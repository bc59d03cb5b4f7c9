from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nemo_like.batch.columns import Layout
from nemo_like.batch.routed_experts import replayed_columns, routed_experts_column
from nemo_like.configuration import Config
from nemo_like.models.model_info import planned_shape, read_model_info

SHAPE = read_model_info(str(planned_shape("Qwen3-30B-A3B")), "megatron")


@pytest.mark.parametrize(("num_experts", "dtype"), [(8, "uint8"), (255, "uint8"), (256, "int16")])
def test_the_column_has_room_for_every_expert_and_for_none(num_experts: int, dtype: str) -> None:
    column = routed_experts_column(replace(SHAPE, num_experts=num_experts))
    assert (column.layout, column.dtype) == (Layout.per_token, dtype)
    assert column.inner_shape == (48, 8)  # layers, experts of a token


def test_only_a_policy_that_replays_reads_it(demo: Callable[..., Config]) -> None:
    cfg = demo()
    assert replayed_columns(cfg.policy) == ()
    cfg.policy.megatron_cfg.router_replay = True
    cfg.policy.model_name = "models/Qwen3-30B-A3B"  # which is not here, but its sizes are shipped
    assert replayed_columns(cfg.policy) == (routed_experts_column(SHAPE),)
