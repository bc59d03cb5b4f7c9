from __future__ import annotations

from typing import Any

import pytest

from nemo_like.policy.worker import PolicyWorker


def test_a_worker_without_coordinates_cannot_be_constructed() -> None:
    others: dict[str, Any] = dict.fromkeys(
        (
            "cfg",
            "loss",
            "temperature",
            "data_plane",
            "weight_sender",
            "master_addr",
            "master_port",
            "timeout_s",
        )
    )
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'coordinates'"):
        PolicyWorker(**others)
