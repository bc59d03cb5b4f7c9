"""Where a put is cut into segments."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from nemo_like.batch.columns import INPUT_IDS, PIXEL_VALUES
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.data_plane.cutting import cut_put
from nemo_like.data_plane.segments import PartitionInfo

NUM_GROUPS = 6


def test_images_that_are_large_are_spread_over_segments() -> None:
    columns = {column.name: column for column in (INPUT_IDS, PIXEL_VALUES)}
    info = PartitionInfo("p", "p-0", columns, frozenset({"p-0"}), num_readers=1)
    chunks = tuple(Chunk(str(number), (2, 2)) for number in range(NUM_GROUPS))
    rows = tuple((number, row) for number in range(NUM_GROUPS) for row in range(2))
    meta = KVBatchMeta("p", chunks, rows, frozenset())

    def num_segments(megabytes: int) -> int:
        # The same memory for all groups: what counts is its size.
        pixels = np.zeros((megabytes << 20) // 4, np.float32)
        wired: dict[str, Any] = {
            "input_ids": np.zeros(4 * NUM_GROUPS, np.int32),
            "pixel_values": [[pixels]] * NUM_GROUPS,
        }
        return len(cut_put(info, meta, wired, map(str, count())))

    assert num_segments(1) == 1
    assert num_segments(30) == 2
