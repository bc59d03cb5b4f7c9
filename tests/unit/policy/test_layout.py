"""The layers of pipeline stages, and the multiples of lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_like.policy.groups.layout import layers_of_stage, length_multiple, stage_layers
from nemo_like.policy.options import Fp8Format, Fp8Recipe
from tests.functional.policy_fixtures import policy_config, teacher_config

END = tuple[int | None, int | None]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "ends", "expected"),
    [
        (61, 1, (None, None), (61,)),
        (8, 4, (None, None), (2, 2, 2, 2)),
        (62, 8, (6, None), (6, *(8,) * 7)),
        (61, 16, (3, 2), (3, *(4,) * 14, 2)),
        (7, 2, (None, 3), (4, 3)),
        (7, 2, (4, 3), (4, 3)),
    ],
)
def test_open_stages_share_the_other_layers(
    num_layers: int, num_stages: int, ends: END, expected: tuple[int, ...]
) -> None:
    cfg = policy_config(Path("unused"), pp=num_stages, end_stages=ends)
    layers = stage_layers(cfg, num_layers)
    assert layers == expected
    assert sum(layers) == num_layers


def test_the_chunks_of_a_stage_lie_between_those_of_the_others() -> None:
    def layers(stage: int, **layout: Any) -> list[list[int]]:
        cfg = policy_config(Path("unused"), pp=2, **layout)
        return [[*chunk] for chunk in layers_of_stage(cfg, 8, stage)]

    assert layers(0, vpp=2) == [[0, 1], [4, 5]]
    assert layers(1, vpp=2) == [[2, 3], [6, 7]]
    assert layers(1, vpp=4) == [[1], [3], [5], [7]]
    assert layers(1, vpp=1) == layers(1) == [[4, 5, 6, 7]]
    assert layers(1, end_stages=(5, None)) == [[5, 6, 7]]


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "ends"),
    [(7, 2, (None, None)), (7, 3, (2, None)), (7, 2, (7, None)), (7, 2, (3, 3)), (7, 2, (9, None))],
)
def test_layers_that_do_not_go_round_are_refused(num_layers: int, num_stages: int, ends: END) -> None:
    with pytest.raises(ValueError, match="cannot be divided over"):
        stage_layers(policy_config(Path("unused"), pp=num_stages, end_stages=ends), num_layers)


@pytest.mark.parametrize(
    ("recipe", "layout", "multiple"),
    [
        (Fp8Recipe.tensorwise, {}, 16),
        (Fp8Recipe.delayed, {"tp": 2}, 16),
        (Fp8Recipe.mxfp8, {"cp": 2}, 4 * 32),
        (Fp8Recipe.blockwise, {"tp": 2, "sequence_parallel": True}, 2 * 128),
        (Fp8Recipe.blockwise, {"tp": 2, "sequence_parallel": True, "cp": 2}, 2 * 4 * 128),
    ],
)
def test_each_rank_has_as_many_tokens_as_products_in_8_bits_take(
    recipe: Fp8Recipe, layout: dict[str, Any], multiple: int
) -> None:
    cfg = policy_config(Path("unused"), **layout)
    plain = length_multiple(cfg)
    cfg.megatron_cfg.fp8, cfg.megatron_cfg.fp8_recipe = Fp8Format.e4m3, recipe
    assert length_multiple(cfg) == multiple
    assert length_multiple(teacher_config(cfg)) == plain  # a teacher scores in its precision
