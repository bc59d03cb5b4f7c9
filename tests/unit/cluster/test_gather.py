"""How a cluster waits for calls, with a Ray in which the test says what has ended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ray.exceptions import RayActorError

from nemo_like.cluster.actor_errors import ActorBroken, ActorDied
from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.breakdown import Breakdown
from nemo_like.cluster.cluster import Cluster


class Ray:
    """References are strings; those in ``ended`` can be had. What is "killed" is gone, what is "broken" or
    "full" says that it broke down."""

    def __init__(self, *ended: str) -> None:
        self.ended = set(ended)
        self.num_waits = 0

    def wait(self, refs: Sequence[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        self.num_waits += 1
        ready = [ref for ref in refs if ref in self.ended][:num_returns]
        return ready, [ref for ref in refs if ref not in ready]

    def get(self, ref: str, timeout: float) -> str | Breakdown:
        if ref.startswith("killed"):
            raise RayActorError
        if ref.startswith("full"):
            return Breakdown("MemoryError", f"{ref}: no memory")
        return Breakdown("OSError", f"{ref}: reset") if ref.startswith("broken") else f"result of {ref}"


def calls(*refs: str) -> list[Call]:
    return [Call("policy", "train", ref) for ref in refs]


def gathered(cluster: Cluster, ray: Ray, *refs: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_like.cluster.cluster.ray", ray)
        return cluster.gather(calls(*refs), stage="policy.train", timeout_s=1.0)


def watching(*refs: str) -> Cluster:
    cluster = Cluster()
    for number, ref in enumerate(refs, start=1):
        name = f"policy-{number}"
        cluster.watch(ActorHandle(name, "logs/policy.log", None), Call(name, "watch", ref))
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


def test_a_process_that_says_that_it_is_of_no_more_use_counts_as_dead() -> None:
    cluster = watching("broken", "alive")
    with pytest.raises(ActorBroken) as caught:
        gathered(cluster, Ray("broken"), "call 0")
    assert str(caught.value) == (
        "actor 'policy-1' failed during stage 'policy.train': broken: reset; its log is logs/policy.log"
    )
    assert isinstance(caught.value, ActorDied)
    assert caught.value.kind == "OSError"


def test_a_breakdown_is_put_down_to_the_death_behind_it() -> None:
    """A worker whose peer is killed may say that it broke down before the peer is gone."""
    cluster = watching("broken 1", "broken 2", "killed 3")
    with pytest.raises(ActorDied, match="actor 'policy-3' died"):
        gathered(cluster, Ray("broken 1", "broken 2", "killed 3"), "call 0")


def test_missing_memory_has_no_death_behind_it() -> None:
    ray = Ray("full 1", "killed 2")
    with pytest.raises(ActorBroken, match="policy-1"):
        gathered(watching("full 1", "killed 2"), ray, "call 0")
    assert ray.num_waits == 1
