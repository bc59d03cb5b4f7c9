"""How a cluster waits for calls, with a Ray in which the test says what has ended."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError

from nemo_like.cluster.actor_errors import ActorBroken, ActorDied, StageTimeout
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


class SlowRay(Ray):
    """Every wait takes what it is given, but for the ``number``-th, which takes ``seconds``: this process is
    stopped in it, and hears afterwards that "call 0" has ended."""

    def __init__(self, number: int, seconds: float) -> None:
        super().__init__()
        self._number, self._seconds = number, seconds
        self.now_s = 50.0

    def wait(self, refs: Sequence[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        waited = super().wait(refs, num_returns=num_returns, timeout=timeout)
        is_stopped = self.num_waits == self._number
        self.now_s += self._seconds if is_stopped else timeout
        if is_stopped:
            self.ended.add("call 0")
        return waited


def calls(*refs: str) -> list[Call]:
    return [Call("policy", "train", ref) for ref in refs]


def gathered(cluster: Cluster, ray: Ray, *refs: str, timeout_s: float = 1.0) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_like.cluster.cluster.ray", ray)
        if isinstance(ray, SlowRay):
            patch.setattr("nemo_like.cluster.cluster.time", SimpleNamespace(monotonic=lambda: ray.now_s))
        return cluster.gather(calls(*refs), stage="policy.train", timeout_s=timeout_s)


def watching(*refs: str) -> Cluster:
    cluster = Cluster()
    for number, ref in enumerate(refs, start=1):
        name = f"policy-{number}"
        cluster.watch(ActorHandle(name, "logs/policy.log", None), Call(name, "watch", ref))
    return cluster


def test_a_wait_tells_once_a_second_who_has_not_answered_and_for_how_long() -> None:
    told: list[tuple[list[str], float]] = []
    ray = SlowRay(number=3, seconds=0.5)  # "call 0" ends in it
    pending = [Call("engine-0", "stats", "call 0"), Call("engine-1", "stats", "call 1")]
    pending.append(Call("engine-1", "hold", "call 2"))  # a name is told once

    def tell(names: Sequence[str], seconds: float) -> None:
        told.append((list(names), seconds))

    with pytest.MonkeyPatch.context() as patch, pytest.raises(StageTimeout):
        patch.setattr("nemo_like.cluster.cluster.ray", ray)
        patch.setattr("nemo_like.cluster.cluster.time", SimpleNamespace(monotonic=lambda: ray.now_s))
        Cluster().gather(pending, stage="start", timeout_s=5.0, on_wait=tell)
    assert told == [
        (["engine-0", "engine-1"], 1.0),
        (["engine-0", "engine-1"], 2.0),
        (["engine-0", "engine-1"], 2.5),
        (["engine-1"], 4.5),
    ]


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


@pytest.mark.parametrize("number", [1, 4])
def test_what_ended_while_this_process_was_stopped_has_missed_no_deadline(number: int) -> None:
    ray = SlowRay(number, seconds=3600.0)
    assert gathered(watching("watch"), ray, "call 0", timeout_s=3.5) == ["result of call 0"]


def test_the_deadline_is_that_of_the_time_in_which_this_process_could_listen() -> None:
    ray = SlowRay(number=2, seconds=3600.0)
    with pytest.raises(StageTimeout, match=r"did not finish within 3\.5 s; still waiting for policy"):
        gathered(watching("watch"), ray, "call 1", timeout_s=3.5)
    assert ray.now_s == 50.0 + 3600.0 + 3.5
