from __future__ import annotations

from collections.abc import Iterator

import pytest

from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.generation.options import WeightTransport
from nemo_like.policy.options import Device
from nemo_like.weight_sync.sender import EngineWeightSender
from nemo_like.weight_transport.shared_memory import Transfer


class BrokenChannel:
    """A channel that fails while it delivers."""

    def __init__(self, error: Exception) -> None:
        self.error, self.is_closed = error, False

    def offer(self, transfer: Transfer, weights: Iterator[tuple[str, object]]) -> None:
        """Take nothing."""

    def deliver(self) -> int:
        raise self.error

    def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("error", [RuntimeError("a peer left"), ValueError("not as announced")])
def test_whatever_breaks_a_delivery_closes_the_channel_so_that_no_engine_waits_for_the_rest(
    error: Exception, stage: int
) -> None:
    sender = EngineWeightSender(
        coordinates=ParallelLayout(tp=1, cp=1, dp=1, pp=2).coordinates(stage),
        device=Device.cpu,
        transport=WeightTransport.auto,
        bucket_mib=1,
        timeout_s=5.0,
    )
    channel = BrokenChannel(error)
    sender._channel = channel
    with pytest.raises(type(error), match=str(error)):
        sender.send(1, iter(()))
    assert channel.is_closed
