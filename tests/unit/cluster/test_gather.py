"""How a cluster waits for calls, with a Ray in which the test says what has ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from nemo_like.cluster.actor_errors import ActorDied
from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.cluster import Cluster


class Ray:
    """References are strings; those in ``ended`` can be had."""

    def __init__(self, *ended: str) -> None:
        self.ended = set(ended)
        self.num_waits = 0

    def wait(self, refs: Sequence[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        self.num_waits += 1
        ready = [ref for ref in refs if ref in self.ended][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: str, timeout: float) -> str:
        return f"result of {ref}"


def calls(*refs: str) -> list[Call]:
    return [Call("policy", "train", ref) for ref in refs]


def gathered(cluster: Cluster, ray: Ray, *refs: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_like.cluster.cluster.ray", ray)
        return cluster.gather(calls(*refs), stage="policy.train", timeout_s=1.0)


def watching(ref: str) -> Cluster:
    cluster = Cluster()
    cluster.watch(ActorHandle("policy-1", None, None), Call("policy-1", "watch", ref))
    return cluster


def test_results_that_are_there_take_two_waits_however_many_they_are() -> None:
    refs = [f"call {number}" for number in range(512)]
    ray = Ray(*reversed(refs))
    assert gathered(watching("watch"), ray, *refs) == [f"result of {ref}" for ref in refs]
    assert ray.num_waits == 2


def test_calls_that_ended_before_an_actor_died_count() -> None:
    ray = Ray("call 0", "call 1", "watch")
    assert gathered(watching("watch"), ray, "call 0", "call 1") == ["result of call 0", "result of call 1"]


def test_a_death_ends_the_wait_for_what_has_not_ended() -> None:
    ray = Ray("call 0", "watch")
    with pytest.raises(ActorDied, match="policy-1"):
        gathered(watching("watch"), ray, "call 0", "call 1")
