"""The driver's side: one version, one wait."""

from __future__ import annotations

import pytest

from nemo_like.cluster.stage import EngineHolds
from nemo_like.observability.metrics import Metric, summed
from nemo_like.weight_sync.sync import EngineWeights, SharedGpus


class Trainer:
    """Stands where the policy worker group does; counts its transfers."""

    def __init__(self) -> None:
        self.pushed: list[int] = []
        self.fails = False

    def push_weights(self, version: int) -> dict[str, Metric]:
        self.pushed.append(version)
        if self.fails:
            raise RuntimeError("engine-0 died")
        return {"weight_sync_bytes": summed(100)}


def test_the_first_version_is_always_transferred() -> None:
    trainer = Trainer()
    metrics = EngineWeights(trainer.push_weights).ensure_version(0)
    assert trainer.pushed == [0]
    assert metrics["weight_sync_bytes"].value == 100
    assert metrics["weight_sync_s"].value >= 0


def test_a_version_the_engines_have_is_not_transferred_again() -> None:
    trainer = Trainer()
    sync = EngineWeights(trainer.push_weights)
    sync.ensure_version(3)
    assert sync.ensure_version(3) == {}
    assert trainer.pushed == [3]


def test_an_older_version_is_refused() -> None:
    trainer = Trainer()
    sync = EngineWeights(trainer.push_weights)
    sync.ensure_version(3)
    with pytest.raises(ValueError, match="version=2 is older"):
        sync.ensure_version(2)
    assert trainer.pushed == [3]


def test_a_failed_transfer_leaves_the_version_unknown() -> None:
    trainer = Trainer()
    sync = EngineWeights(trainer.push_weights)
    sync.ensure_version(3)
    trainer.fails = True
    with pytest.raises(RuntimeError, match="engine-0 died"):
        sync.ensure_version(4)
    trainer.fails = False
    sync.ensure_version(4)
    assert trainer.pushed == [3, 4, 4]


def test_engines_that_share_gpus_wake_and_sleep_with_the_stages_and_keep_their_version() -> None:
    trainer, held = Trainer(), []
    sync = EngineWeights(trainer.push_weights, SharedGpus(held.append, keeps_weights=True))
    sync.ensure_version(3)
    assert held == [EngineHolds.weights, EngineHolds.everything]
    sync.end_generation()
    assert held[2:] == [EngineHolds.nothing]
    assert sync.ensure_version(3) == {}
    assert held[3:] == [EngineHolds.everything]
    assert trainer.pushed == [3]


def test_engines_that_lose_their_weights_asleep_get_the_same_version_again() -> None:
    trainer, held = Trainer(), []
    sync = EngineWeights(trainer.push_weights, SharedGpus(held.append, keeps_weights=False))
    sync.ensure_version(3)
    assert sync.ensure_version(3) == {}  # they did not sleep
    sync.end_generation()
    sync.ensure_version(3)
    assert held[2:] == [EngineHolds.nothing, EngineHolds.weights, EngineHolds.everything]
    assert trainer.pushed == [3, 3]
    sync.end_generation()
    with pytest.raises(ValueError, match=r"engines are at policy version 3; version=2 is older"):
        sync.ensure_version(2)


def test_new_engines_are_told_again_what_to_hold() -> None:
    trainer, held = Trainer(), []
    sync = EngineWeights(trainer.push_weights, SharedGpus(held.append, keeps_weights=True))
    sync.ensure_version(3)
    sync.forget()
    sync.ensure_version(3)
    assert held == [EngineHolds.weights, EngineHolds.everything] * 2


def test_the_digest_of_what_was_sent_is_kept_and_is_no_metric() -> None:
    sent = {"weights_digest": summed(17), "weight_sync_bytes": summed(5)}
    sync = EngineWeights(lambda version: sent)
    assert sync.digest is None
    assert "weights_digest" not in sync.ensure_version(0)
    assert sync.digest == 17
    assert sync.ensure_version(0) == {}
    assert sync.digest == 17
