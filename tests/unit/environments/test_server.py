"""The actor that hosts an environment, when it fails itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from nemo_like.cluster import breakdown
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.server import EnvironmentServer
from tests.unit.environments.configs import env_config

TURN = Turn(prompt="1+1=", response="2", answer="2", is_truncated=False, data={})


def raising(error: Exception, monkeypatch: pytest.MonkeyPatch) -> EnvironmentServer:
    """A server that fails before it asks its environment."""
    monkeypatch.setattr(breakdown, "_breakdown", Future())
    server = EnvironmentServer("sums", env_config("arithmetic"))

    async def asked(turns: Sequence[Turn]) -> Sequence[Feedback]:
        raise error

    monkeypatch.setattr(server, "_asked", asked)
    return server


def test_an_actor_without_memory_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError):
        asyncio.run(raising(MemoryError(), monkeypatch).step([TURN]))
    assert breakdown.breakdown_future().result().kind == "MemoryError"


def test_an_environment_that_does_not_start_again_fails_its_samples_and_no_actor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (feedback,) = asyncio.run(raising(RuntimeError("no process"), monkeypatch).step([TURN]))
    assert feedback.failure is not None
    assert feedback.failure.kind is FailureKind.died
    assert not breakdown.breakdown_future().done()
