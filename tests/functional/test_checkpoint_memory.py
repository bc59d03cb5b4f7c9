"""How much memory of the host the ranks need while an optimizer that is sharded is saved and loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from nemo_like.checkpoint.options import CheckpointWriting
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.models.model_info import read_model_info
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.options import PolicyConfig
from tests.functional.policy_fixtures import loss_config, make_checkpoint, policy_config, ready_worker
from tests.functional.worlds import run_world

VOCAB_SIZE = 400_000  # of some 13 million parameters, whose moments are far larger than everything else


def resident_bytes(which: str) -> int:
    (kib,) = re.findall(rf"^{which}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(kib) * 1024


def taken(work: Callable[[], None]) -> int:
    """How many bytes more than before this process had at one moment of the work."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = resident_bytes("VmRSS")
    work()
    return resident_bytes("VmHWM") - before


def save_and_load(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> tuple[int, int]:
    worker = ready_worker(cfg, loss_config(), coordinates, InMemoryDataPlane())
    worker.save_checkpoint(str(path), CheckpointWriting.blocking)  # makes the moments
    worker.wait_for_checkpoint()
    again = path.with_name("again")
    if dist.get_rank() == 0:
        again.mkdir()
    dist.barrier()

    def save() -> None:
        worker.save_checkpoint(str(again), CheckpointWriting.blocking)
        worker.wait_for_checkpoint()

    return taken(save), taken(lambda: worker.load_checkpoint(str(again), version=0))


def test_one_rank_of_those_that_share_an_optimizer_holds_all_of_it(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", vocab_size=VOCAB_SIZE)
    cfg = policy_config(model, dp=2)
    (tmp_path / "first").mkdir()
    first, second = run_world(save_and_load, parallel_layout(cfg), cfg, tmp_path / "first")
    whole = 12 * read_model_info(cfg.model_name, cfg.backend).num_parameters
    for of_first, of_second in zip(first, second, strict=True):
        assert of_first >= whole  # else nothing was measured
        assert of_second <= 0.6 * whole  # its half, and little more
