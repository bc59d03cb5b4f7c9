from __future__ import annotations

from nemo_like.data_plane.mooncake_transfer import merged


def test_memory_that_overlaps_or_touches_is_one_region() -> None:
    assert merged([(40, 10), (0, 10), (10, 5), (12, 20), (14, 2)]) == [(0, 32), (40, 10)]
    assert merged([(8, 4), (8, 4)]) == [(8, 4)]
    assert merged([]) == []
