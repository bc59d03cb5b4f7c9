from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from nemo_like.checkpoint.options import CheckpointWriting
from nemo_like.policy.workers.checkpoint_writer import CheckpointWriter


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """A world of one rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_the_copy_of_the_state_goes_once_it_is_written_without_the_garbage_collector(
    alone: dist.ProcessGroup, tmp_path: Path
) -> None:
    writer = CheckpointWriter(alone, CheckpointWriting.background)
    copy = writer.copied(torch.ones(4))
    lives = weakref.ref(copy)
    gc.disable()
    try:
        writer.write({"weight": copy}, tmp_path)
        del copy
        writer.complete(tmp_path)
        assert writer.wait(60)
        assert lives() is None
    finally:
        gc.enable()
