from __future__ import annotations

from datetime import timedelta

from torch import distributed as dist
from torch._C._distributed_c10d import Backend


def test_options_of_a_group_have_its_deadline_and_gloos_its_devices() -> None:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=7)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._threads = 2
    assert options._timeout == timedelta(seconds=7)
    assert len(options._devices) == 1


def test_the_deadline_is_an_option_of_every_backend() -> None:
    """NCCL's too, which is not in every build of torch."""
    assert isinstance(Backend.Options._timeout, property)
    assert issubclass(dist.ProcessGroupGloo._Options, Backend.Options)
