"""Several real Ray nodes on one machine: what runs where, and what happens when a node dies."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray.cluster_utils import Cluster as RayNodes

from nemo_like.cluster.actor_errors import ActorDied, ClusterError
from nemo_like.cluster.actors import ActorSpec
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.placement import Bundle
from nemo_like.cluster.runtime import interface_of
from nemo_like.cluster.watchdog import on_every_node
from nemo_like.generation.engine_spec import EngineNode
from nemo_like.generation.environment import engine_environment
from nemo_like.generation.options import WeightTransport
from nemo_like.policy.options import Device
from tests.functional.generation_fixtures import collector_spec, engine_spec, make_checkpoint, stage_spec
from tests.functional.leftovers import soon
from tests.functional.runs import MARK, read_metrics, running, wait_for_step, wait_until_gone
from tests.functional.weight_setup import Setup

pytestmark = pytest.mark.timeout(240)

CPUS_PER_NODE = 4
PROBE = "tests.functional.test_placement:Probe"


class Probe:
    """Says where it is."""

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def interfaces(self) -> list[str | None]:
        return [os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")]

    def hang(self) -> None:
        import threading

        threading.Event().wait(120)


def node_of(log_paths: Mapping[str, str]) -> str:
    """Where it runs."""
    return str(ray.get_runtime_context().get_node_id())


def bundle(names: Sequence[str], num_cpus: float) -> Bundle:
    return Bundle(dict.fromkeys(names, ()), num_cpus, num_gpus=0)


def is_of_run(process: psutil.Process, mark: str, title: str) -> bool:
    """Whether the process with this title is one of the run with this mark."""
    try:
        return process.environ().get(MARK) == mark and title in " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


@dataclass
class Nodes:
    """Two Ray nodes; their processes carry ``mark``."""

    ray: RayNodes
    second: object
    mark: str


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    started = RayNodes(
        initialize_head=True, head_node_args={"num_cpus": CPUS_PER_NODE, "include_dashboard": False}
    )
    second = started.add_node(num_cpus=CPUS_PER_NODE)
    yield Nodes(started, second, mark)
    ray.shutdown()
    started.shutdown()


@pytest.fixture
def cluster(nodes: Nodes) -> Iterator[Cluster]:
    ray.init(address=nodes.ray.address, log_to_driver=False)
    cluster = Cluster()
    yield cluster
    cluster.stop()


def assert_refuses_what_cannot_be_placed(cluster: Cluster) -> None:
    with pytest.raises(
        ClusterError, match=r"no node has 5 CPUs on one node for a, b; .* 2 x 4 CPUs and 0 GPUs"
    ):
        cluster.reserve([bundle(("a", "b"), num_cpus=5)], timeout_s=60)
    three = [bundle((name,), num_cpus=3) for name in "abc"]
    with pytest.raises(ClusterError, match="could not reserve the run's resources within 1 s: 3 CPUs on one"):
        cluster.reserve(three, timeout_s=1)
    cluster.reserve(three[:2], timeout_s=60)  # what was refused holds nothing
    cluster.stop()
    # Ray spreads over what it knows to be free, and hears of what was given back a little later.
    assert soon(lambda: ray.available_resources().get("CPU") == 2 * CPUS_PER_NODE), ray.available_resources()


def test_bundles_are_whole_and_spread_and_a_lost_node_is_named(nodes: Nodes, cluster: Cluster) -> None:
    assert_refuses_what_cannot_be_placed(cluster)
    groups = [tuple(f"worker-{rank}" for rank in (first, first + 1)) for first in (0, 2)]
    cluster.reserve([bundle(names, num_cpus=2) for names in groups], timeout_s=60)
    workers = {name: cluster.start(ActorSpec(name, PROBE)) for names in groups for name in names}
    calls = [worker.submit("node") for worker in workers.values()]
    first, second, third, fourth = cluster.gather(calls, stage="start", timeout_s=60)
    assert first == second != third == fourth

    # Both nodes are on this machine's loopback, and collectives stay there.
    address = cluster.endpoint("worker-0", timeout_s=60)[0]
    (interfaces,) = cluster.gather([workers["worker-0"].submit("interfaces")], stage="ask", timeout_s=60)
    assert interfaces == [interface_of(address)] * 2
    other_address, other_port = cluster.endpoint("worker-2", timeout_s=60)
    assert (other_address, 0 < other_port < 65536) == (address, True)

    # What hangs is looked for on both.
    found, problems = on_every_node(node_of, {})
    assert (sorted(found), problems) == (sorted([first, third]), [])

    on_second = "worker-0" if first == nodes.second.node_id else "worker-2"  # type: ignore[attr-defined]
    elsewhere = workers["worker-2" if on_second == "worker-0" else "worker-0"]
    waiting = elsewhere.submit("hang")
    nodes.ray.remove_node(nodes.second, allow_graceful=False)
    with pytest.raises(
        ActorDied, match=rf"died during stage 'training'; .*; every actor on node {address} is gone"
    ):
        cluster.gather([waiting], stage="training", timeout_s=60)


@pytest.mark.slow
@pytest.mark.whole_run
def test_a_replica_on_each_of_two_nodes_sends_to_the_engine_there(
    nodes: Nodes, arithmetic_model: str, tmp_path: Path
) -> None:
    overrides = [
        *(f"cluster.address={nodes.ray.address}", "cluster.num_nodes=2", "cluster.placement=colocated"),
        *("generation.weight_transport=shared_memory", "grpo.max_num_steps=3", "grpo.val_at_start=false"),
        "grpo.val_at_end=false",
    ]
    with running(tmp_path, overrides, name=nodes.mark) as (process, _, run_dir):
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    records = read_metrics(run_dir)
    assert len(records) == 3
    assert max(record["train/token_mult_prob_error"] for record in records) < 1.001
    assert records[0]["weight_sync/weight_sync_bytes"] == pytest.approx(
        2 * 4 * 402_176, rel=0.01
    )  # both replicas sent


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_engine_over_two_nodes_is_one_engine(nodes: Nodes, cluster: Cluster, tmp_path: Path) -> None:
    """Its first node has one of its two workers, and the second node the other."""
    on_nodes = [("two-nodes", "trainer-0"), ("part", "one-node", "sink")]
    cluster.reserve([bundle(names, num_cpus=3) for names in on_nodes], timeout_s=60)
    checkpoint = make_checkpoint(tmp_path / "model", tied=False)
    address, port = cluster.endpoint("two-nodes", timeout_s=60)

    def of_node(rank: int, name: str, **target: str) -> ActorSpec:
        spec = engine_spec(checkpoint, name, tensor_parallel_size=2, num_nodes=2, **target)
        own = {**spec.kwargs, "node": EngineNode(rank, address, port)}
        return replace(spec, kwargs=own, env=engine_environment(Device.cpu, 2))

    part = cluster.start(of_node(1, "part", target="nemo_like.generation.engine_part:EnginePart"))
    engines = [cluster.start(of_node(0, "two-nodes")), cluster.start(engine_spec(checkpoint, "one-node"))]
    stage = cluster.start(stage_spec(checkpoint, "trainer", 0, 1, WeightTransport.auto))
    setup = Setup(cluster, engines, [stage], cluster.start(collector_spec("sink")))
    setup.connect()
    for version in (0, 1):
        setup.update(version)
        setup.push(version)
        assert setup.logprob_error(setup.generate(f"v{version}")) < 1e-4
        ours, theirs = setup.generate(f"again-{version}")
        for response, same in zip(ours.responses, theirs.responses, strict=True):
            assert response.token_ids.tolist() == same.token_ids.tolist()
            np.testing.assert_allclose(response.logprobs, same.logprobs, atol=1e-5)
    [pid] = cluster.gather([part.process_id()], stage="ask", timeout_s=60)
    psutil.Process(pid).children()[0].kill()
    with pytest.raises(ActorDied, match="'part' died during stage 'generation'"):
        cluster.gather([setup.sink.submit("wait_for", ["never"], 60)], stage="generation", timeout_s=60)


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_an_engine_over_two_nodes_is_replaced_when_its_part_dies(
    nodes: Nodes, arithmetic_model: str, tmp_path: Path
) -> None:
    overrides = [
        *(f"cluster.address={nodes.ray.address}", "cluster.num_nodes=2", "generation.num_engines=1"),
        *("generation.vllm_cfg.tensor_parallel_size=2", "generation.vllm_cfg.num_nodes=2"),
        *("grpo.max_num_steps=4", "grpo.val_at_start=false", "grpo.val_at_end=false"),
        *("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4"),
        *("policy.train_global_batch_size=32", "policy.scheduler.decay_style=constant"),
    ]
    with running(tmp_path, overrides, name=nodes.mark) as (process, _, run_dir):
        wait_for_step(process, run_dir, step=2, timeout_s=300)
        [worker] = [one for one in psutil.process_iter() if is_of_run(one, nodes.mark, "VLLM::Worker_TP1")]
        worker.kill()
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert re.search("actor 'engine(_part)?' died during stage", output), output
    assert "(recovery 1 of" in output, output
    records = read_metrics(run_dir)
    assert [record["train/policy_version"] for record in records] == [0.0, 1.0, 2.0, 3.0]
    assert max(record["train/token_mult_prob_error"] for record in records) < 1.001


@pytest.mark.slow
@pytest.mark.whole_run
def test_a_run_over_two_nodes_trains_and_names_the_node_that_dies(
    nodes: Nodes, arithmetic_model: str, tmp_path: Path
) -> None:
    overrides = [
        *(f"cluster.address={nodes.ray.address}", "cluster.num_nodes=2", "grpo.max_num_steps=1000"),
        "generation.num_engines=1",
        *("grpo.val_at_start=false", "policy.scheduler.decay_style=constant", "cluster.max_restarts=0"),
    ]
    with running(tmp_path, overrides, name=nodes.mark) as (process, _, run_dir):
        wait_for_step(process, run_dir, step=2)
        nodes.ray.remove_node(nodes.second, allow_graceful=False)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1, output
    assert "; every actor on node" in output, output
    records = read_metrics(run_dir)
    assert [record["train/policy_version"] for record in records[:2]] == [0.0, 1.0]
    assert max(record["train/token_mult_prob_error"] for record in records) < 1.001
    nodes.ray.shutdown()
    assert wait_until_gone(nodes.mark) == []
