"""Process groups of one process share one gloo device, and work."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed as dist

from nemo_like.cluster.coordinates import Coordinates, ParallelLayout
from nemo_like.compat.gloo import one_gloo_device
from tests.functional.worlds import run_world

NUM_GROUPS = 6


def groups_in_and_out_of_the_block(coordinates: Coordinates) -> tuple[list[float], int, int]:
    """Sums over each group made in the block; devices that those took, and those made after it."""
    before = num_devices()
    with one_gloo_device():
        everyone = [dist.new_group([0, 1], backend="gloo") for _ in range(NUM_GROUPS)]
        for rank in (0, 1):  # most groups of a layout hold one rank
            dist.new_group([rank], backend="gloo")
    shared = num_devices()
    sums = []
    for group in everyone:
        value = torch.tensor(float(coordinates.rank + 1))
        dist.all_reduce(value, group=group)
        sums.append(value.item())
    dist.new_group([0, 1], backend="gloo")
    return sums, shared - before, num_devices() - shared


def num_devices() -> int:
    """Each has one thread of this name."""
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def test_groups_share_a_device_and_reduce_each_for_itself() -> None:
    for sums, num_shared, num_own in run_world(
        groups_in_and_out_of_the_block, ParallelLayout(tp=1, cp=1, dp=2, pp=1)
    ):
        assert sums == [3.0] * NUM_GROUPS
        assert num_shared <= 1  # none where an earlier world of these processes has it
        assert num_own == 1
