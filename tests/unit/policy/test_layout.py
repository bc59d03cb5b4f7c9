"""The layers of pipeline stages."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.policy.groups.layout import stage_layers
from tests.functional.policy_fixtures import policy_config

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


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "ends"),
    [(7, 2, (None, None)), (7, 3, (2, None)), (7, 2, (7, None)), (7, 2, (3, 3)), (7, 2, (9, None))],
)
def test_layers_that_do_not_go_round_are_refused(num_layers: int, num_stages: int, ends: END) -> None:
    with pytest.raises(ValueError, match="cannot be divided over"):
        stage_layers(policy_config(Path("unused"), pp=num_stages, end_stages=ends), num_layers)
