"""Replacing processes and doing work again, with processes that exist by name only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.cluster.actor_errors import ActorBroken, ActorDied, ActorFailed
from nemo_like.data.interface import SourceReport
from nemo_like.data.sampler import MixtureSampler
from nemo_like.data_plane.storage_errors import CapacityExceeded, CorruptData, StorageFailed
from nemo_like.driver.processes import Actors
from nemo_like.driver.recovery import ActorRecovery, Recoverable
from nemo_like.driver.run_failures import RunFailed
from nemo_like.observability.metrics import Metric
from nemo_like.plan.roles import Role
from nemo_like.rollout.prompts import RolloutMode, RolloutParts
from nemo_like.weight_sync.sync import EngineWeights

VERSION = 4


def parts(digest: str) -> RolloutParts:
    source = SourceReport(name="sums", num_prompts=100, num_too_long=0, digest=digest)
    return RolloutParts({RolloutMode.training: (source,), RolloutMode.validation: ()}, ())


class Process:
    """Stands where a handle does."""

    log_path = None

    def __init__(self, name: str) -> None:
        self.name = name

    def submit(self, method: str, *args: object) -> tuple[str, str]:
        return self.name, method

    def process_id(self) -> tuple[str, str]:
        return self.name, "process_id"


class Run:
    """Plays every part that a recovery deals with, and remembers what it was asked."""

    def __init__(self, directory: Path) -> None:
        self.dead_names: set[str] = set()
        self.unseen_deaths: set[str] = set()
        self.failed_engines: set[str] = set()
        self.settled_version: int | None = VERSION
        self.dies_during: dict[tuple[str, str], str] = {}  # a call, and who dies while it is waited for
        self.cannot_start: set[str] = set()  # names of engines of which the first new one fails
        self.asked: list[tuple[str, str]] = []
        self.started: list[str] = []
        self.warnings: list[str] = []
        self.actors = Actors(
            host=Process("data_plane"),  # type: ignore[arg-type]
            engines=[Process("engine-0"), Process("engine-1")],  # type: ignore[list-item]
            groups={Role.policy_worker: [Process("policy_worker")]},  # type: ignore[list-item]
            environments={"sums": [Process("environment")]},  # type: ignore[list-item]
            rollout=Process("rollout"),  # type: ignore[arg-type]
        )
        self.digests = ["d1", "d1"]  # what each rollout actor that attaches finds
        self.sampler = MixtureSampler([100], [1.0], seed=1, shuffle=False)
        self.weight_sync = EngineWeights(self._push)
        policy = SimpleNamespace(
            version=VERSION,
            settle=lambda: self.settled_version,
            **self._noting("connect_weights", "reconnect_data_plane"),
        )
        self.recovery = ActorRecovery(
            SimpleNamespace(max_recoveries=2, start_timeout_s=1.0, stage_timeout_s=1.0),  # type: ignore[arg-type]
            Recoverable(  # type: ignore[arg-type]
                cluster=self,
                starter=self,
                actors=self.actors,
                rollout=SimpleNamespace(**self._noting("abandon", "reconnect", "move_to")),
                partitions=SimpleNamespace(**self._noting("take_operations", "move_to")),
                policy=policy,
                groups=[policy],
                weight_sync=self.weight_sync,
                schedule=SimpleNamespace(
                    state_dict=self.sampler.state_dict,
                    load_state_dict=self.sampler.load_state_dict,
                    abandon=lambda work: self.asked.append((work, "abandon rollouts")),
                ),
                observation=SimpleNamespace(**self._noting("mark_ranges")),
                sources=parts("d1").sources,
                logger=SimpleNamespace(warn=self.warnings.append),
                directory=SimpleNamespace(path=directory),
            ),
        )

    def dead(self) -> list[str]:
        return list(self.dead_names - self.unseen_deaths)

    def discard(self, handle: Process) -> None:
        self.dead_names.discard(handle.name)

    def watch(self, handle: Process, call: object) -> None:
        self.asked.append((handle.name, "watch"))

    def gather(self, calls: Sequence[tuple[str, str]], **options: object) -> list[Any]:
        for name, method in calls:
            if victim := self.dies_during.pop((name, method), None):
                self.dead_names.add(victim)
                raise ActorDied(victim, "recovery", None)
            if name in self.cannot_start and method == "stats":
                self.cannot_start.remove(name)
                self.dead_names.add(name)
                raise ActorFailed(name, "__init__", "recovery", RuntimeError("no free memory"), None)
            if method == "abort_all" and name in self.dead():  # an actor that broke down may still answer
                raise ActorDied(name, "recovery", None)
            if method == "abort_all" and name in self.failed_engines:
                raise ActorFailed(name, method, "recovery", RuntimeError("half loaded"), None)
            self.asked.append((name, method))
        return [parts(self.digests.pop(0)) if method == "attach" else 1 for _, method in calls]

    def engines(self, indices: Sequence[int]) -> list[Process]:
        return [self._start(f"engine-{index}") for index in indices]

    def environment(self, name: str, index: int) -> Process:
        return self._start("environment")

    def host(self) -> Process:
        return self._start("data_plane")

    def rollout(self, *parts: object) -> Process:
        return self._start("rollout")

    def data_plane(self, host: Process) -> str:
        return "data plane"

    def work(
        self,
        *deaths: str,
        lost_nodes: Sequence[str] = (),
        raising: str | None = None,
        failing: Exception | None = None,
    ) -> Callable[[], tuple[int, ...]]:
        """Takes two prompts, then one of these processes dies, or breaks down by an error of class
        ``raising``, or a call of it raises ``failing``; nothing happens once all of them have."""
        left = list(deaths)

        def take() -> tuple[int, ...]:
            prompts = self.sampler.next(2)
            if left:
                name = left.pop(0)
                if failing is not None:
                    raise ActorFailed(name, "train", "policy.train", failing, "worker.log")
                self.dead_names.add(name)
                death = ActorDied(name, "generation", None)
                if raising is not None:
                    death = ActorBroken(name, "generation", None, f"{raising}: full", raising)
                death.lost_nodes = lost_nodes
                raise death
            return prompts

        return take

    def _start(self, name: str) -> Process:
        self.started.append(name)
        return Process(name)

    def _push(self, version: int) -> dict[str, Metric]:
        self.asked.append(("weights", str(version)))
        return {}

    def _noting(self, *methods: str) -> dict[str, Any]:
        return {method: lambda *args, method=method: self.asked.append(("", method)) for method in methods}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


@pytest.mark.parametrize("victim", ["engine-1", "environment", "rollout", "data_plane"])
def test_the_one_that_died_is_replaced_and_the_same_prompts_are_asked_again(run: Run, victim: str) -> None:
    before = run.actors.all()
    assert run.recovery.completed("step 5", VERSION, run.work(victim)) == (0, 1)
    assert run.started == [victim]
    changed = [old.name for old, new in zip(before, run.actors.all(), strict=True) if old is not new]
    assert changed == [victim]
    assert run.asked[0] == ("step 5", "abandon rollouts")
    assert ("", "abandon") in run.asked or victim == "rollout"
    assert ("", "connect_weights") in run.asked or victim != "engine-1"
    assert (("", "reconnect_data_plane") in run.asked) == (victim == "data_plane")
    assert "actor" in run.warnings[0]
    assert "doing step 5 again (recovery 1 of 2)" in run.warnings[0]


def test_weights_the_engines_had_when_the_work_began_are_there_when_it_begins_again(run: Run) -> None:
    run.weight_sync.ensure_version(VERSION)
    run.recovery.completed("step 5", VERSION, run.work("rollout"))
    assert run.weight_sync.version == VERSION
    assert run.asked.count(("weights", str(VERSION))) == 2


def test_weights_that_the_work_itself_transfers_are_left_to_it(run: Run) -> None:
    run.weight_sync.ensure_version(VERSION - 1)
    run.recovery.completed("step 5", VERSION, run.work("engine-0"))
    assert run.weight_sync.version is None
    assert ("weights", str(VERSION)) not in run.asked


def test_an_engine_that_broke_off_loading_is_replaced_with_the_one_that_died(run: Run) -> None:
    run.failed_engines = {"engine-0"}
    run.recovery.completed("step 5", VERSION, run.work("engine-1"))
    assert run.started == ["engine-0", "engine-1"]


@pytest.mark.parametrize("second", ["rollout", "environment", "engine-1"])
def test_a_death_amid_a_recovery_leaves_nobody_unconnected(run: Run, second: str) -> None:
    run.dies_during = {("engine-1", "stats"): second}
    assert run.recovery.completed("step 5", VERSION, run.work("engine-1")) == (0, 1)
    assert run.started == ["engine-1", second]
    assert run.asked.count(("", "connect_weights")) == 1
    assert run.dead_names == set()


def test_a_new_rollout_actor_has_nothing_to_abandon(run: Run) -> None:
    run.dies_during = {("rollout", "attach"): "data_plane"}
    run.recovery.completed("step 5", VERSION, run.work("rollout"))
    assert run.started == ["rollout", "data_plane"]
    assert ("", "abandon") not in run.asked
    assert ("", "reconnect") in run.asked  # it may have been started with one that is gone
    assert ("", "reconnect_data_plane") in run.asked


def test_a_new_rollout_actor_that_reads_other_data_ends_the_run(run: Run) -> None:
    run.digests = ["d2"]
    with pytest.raises(RunFailed, match=r"data have changed since the run started.*sums has 100 problems"):
        run.recovery.completed("step 5", VERSION, run.work("rollout"))


def test_there_is_an_end_to_it(run: Run) -> None:
    with pytest.raises(ActorDied, match="'engine-0' died"):
        run.recovery.completed("step 5", VERSION, run.work("rollout", "environment", "engine-0"))
    assert run.started == ["rollout", "environment"]


@pytest.mark.parametrize(
    ("victim", "settled_version", "lost_nodes"),
    [
        pytest.param("policy_worker", VERSION, [], id="a policy worker"),
        pytest.param("engine-0", VERSION + 1, [], id="trained meanwhile"),
        pytest.param("data_plane", None, [], id="an update broke off"),
        pytest.param("engine-0", VERSION, ["192.0.2.1"], id="a node"),
    ],
)
def test_a_death_that_cost_more_than_a_process_is_not_recovered(
    run: Run, victim: str, settled_version: int | None, lost_nodes: list[str]
) -> None:
    run.settled_version = settled_version
    with pytest.raises(ActorDied, match=victim):
        run.recovery.completed("step 5", VERSION, run.work(victim, lost_nodes=lost_nodes))
    assert run.started == []


def test_a_policy_worker_that_died_too_is_not_recovered(run: Run) -> None:
    run.dead_names = {"policy_worker"}
    with pytest.raises(ActorDied, match="'policy_worker' died during stage 'recovery'"):
        run.recovery.completed("step 5", VERSION, run.work("engine-0"))
    assert run.started == []


def test_an_engine_that_raised_is_replaced_as_one_that_died(run: Run) -> None:
    assert run.recovery.completed("step 5", VERSION, run.work("engine-1", raising="MemoryError")) == (0, 1)
    assert run.started == ["engine-1"]
    assert run.warnings[0].startswith("actor 'engine-1' failed during stage 'generation': MemoryError: full;")


def test_an_actor_whose_death_a_call_told_is_replaced_before_the_cluster_sees_it(run: Run) -> None:
    run.unseen_deaths = {"engine-1"}
    assert run.recovery.completed("step 5", VERSION, run.work("engine-1", raising="MemoryError")) == (0, 1)
    assert run.started == ["engine-1"] and len(run.warnings) == 1


def test_an_error_that_comes_again_in_the_same_step_is_not_recovered_a_second_time(run: Run) -> None:
    with pytest.raises(ActorBroken, match="'engine-1' failed"):
        run.recovery.completed("step 5", VERSION, run.work("engine-0", "engine-1", raising="MemoryError"))
    assert run.started == ["engine-0"]
    assert run.warnings[-1] == "MemoryError came again when step 5 was done again"


def test_the_same_error_in_another_step_is_recovered(run: Run) -> None:
    for step in ("step 5", "step 6"):
        run.recovery.completed(step, VERSION, run.work("engine-0", raising="MemoryError"))
    assert run.started == ["engine-0", "engine-0"]


def test_nothing_is_replaced_on_a_full_disk(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_like.observability.disk._free_bytes", lambda directory: 0)
    with pytest.raises(ActorDied, match="'engine-0' died"):
        run.recovery.completed("step 5", VERSION, run.work("engine-0"))
    assert run.started == []


def test_a_replacement_that_cannot_start_is_replaced_too(run: Run) -> None:
    run.cannot_start = {"engine-1"}
    assert run.recovery.completed("step 5", VERSION, run.work("engine-1")) == (0, 1)
    assert run.started == ["engine-1", "engine-1"]
    assert "failed during stage 'recovery': RuntimeError: no free memory" in run.warnings[1]
    assert run.dead_names == set()


@pytest.mark.parametrize(
    ("who", "error"),
    [
        ("policy_worker", StorageFailed("a put failed: ZMQError: no memory")),
        ("rollout", StorageFailed("partition 'train-5': reserve failed: OSError: no file")),
        ("data_plane", OSError(24, "Too many open files")),
    ],
)
def test_a_data_plane_that_lives_and_fails_is_replaced(run: Run, who: str, error: Exception) -> None:
    assert run.recovery.completed("step 5", VERSION, run.work(who, failing=error)) == (0, 1)
    assert run.started == ["data_plane"]
    assert run.warnings[0].startswith("actor 'data_plane' failed during stage 'policy.train': ")
    assert ("", "reconnect_data_plane") in run.asked


@pytest.mark.parametrize(
    ("who", "error"),
    [
        ("policy_worker", RuntimeError("shapes differ")),
        ("rollout", CapacityExceeded("no room for the write")),
        ("rollout", CorruptData("of another segment")),
        ("data_plane", KeyError("a mistake in the catalogue")),
    ],
)
def test_what_a_check_raised_or_another_process_is_no_fault_of_the_data_plane(
    run: Run, who: str, error: Exception
) -> None:
    with pytest.raises(ActorFailed):
        run.recovery.completed("step 5", VERSION, run.work(who, failing=error))
    assert run.started == []


def test_a_data_plane_that_fails_the_same_way_again_ends_it(run: Run) -> None:
    error = StorageFailed("a put failed")
    with pytest.raises(ActorBroken, match="data_plane"):
        run.recovery.completed("step 5", VERSION, run.work("rollout", "rollout", failing=error))
    assert run.started == ["data_plane"]
