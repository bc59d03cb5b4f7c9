"""Placement on GPUs, on real Ray nodes that say they have eight GPUs each.

Every process of a run is started where the plan has it and reports its node and the GPUs that it sees; the
processes themselves are probes, since there is no GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster as RayNodes

from nemo_like.cluster.actors import ActorSpec
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.options import Placement
from nemo_like.cluster.placement import Bundle
from nemo_like.configuration import Config, load_config
from nemo_like.driver.bundles import bundles
from nemo_like.plan.places import placement
from tests.functional.gpu_probe import Seen, look
from tests.unit.config.checkpoints import DEMO
from tests.unit.config.recipes import GPUS_PER_NODE, RECIPES, num_nodes

pytestmark = pytest.mark.timeout(300)

NUM_STRANGERS = 4
# Ray kills a process that has not registered after a minute and starts another: of too many at once on two
# cores none ever does.
AT_ONCE = 16
SIZE = {"num_cpus": 64, "num_gpus": GPUS_PER_NODE}
PROBE = "tests.functional.gpu_probe:Probe"

MEGATRON = "policy.megatron_cfg"
ENGINE_TP = "generation.vllm_cfg.tensor_parallel_size"
COLOCATED = "cluster.placement=colocated"


# Up to 24 nodes and 192 processes take all of two cores, so nothing runs beside them.
OF_ALL_NODES = [
    pytest.mark.slow,
    pytest.mark.whole_run,
    pytest.mark.xdist_group("nodes"),
    pytest.mark.timeout(1800),
]


class Nodes:
    """A Ray cluster that has as many nodes as a test asks for, and those of the tests before it."""

    def __init__(self) -> None:
        self._started = RayNodes(initialize_head=True, head_node_args={**SIZE, "include_dashboard": False})
        self._num = 1
        ray.init(address=self._started.address, log_to_driver=False)

    def at_least(self, num: int) -> None:
        while self._num < num:
            self._started.add_node(**SIZE)
            self._num += 1

    def stop(self) -> None:
        ray.shutdown()
        self._started.shutdown()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes()
    yield nodes
    nodes.stop()


@pytest.fixture
def cluster(nodes: Nodes) -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.stop()


def layout(*overrides: str, num_nodes: int = 1) -> Callable[[Path], Config]:
    gpus = ("policy.device=cuda", "policy.precision=bfloat16", "cluster.address=auto")
    nodes = (f"cluster.num_nodes={num_nodes}", f"cluster.gpus_per_node={GPUS_PER_NODE}")
    return lambda path: load_config(DEMO, [f"policy.model_name={path}", *gpus, *nodes, *overrides])


def recipe(file: Path) -> Callable[[Path], Config]:
    return lambda path: load_config(file, [])


def megatron(**sizes: int) -> list[str]:
    short = {"tp": "tensor_model", "pp": "pipeline_model", "ep": "expert_model", "cp": "context"}
    return [f"{MEGATRON}.{short[axis]}_parallel_size={size}" for axis, size in sizes.items()]


QUICK = {
    "colocated-tp2-engines-of-1": layout(
        COLOCATED, *megatron(tp=2), "policy.data_parallel_size=1", "generation.num_engines=2"
    ),
}
# The largest come last: the nodes of a test stay for those after it, and each takes some of two cores.
SLOW = {
    "colocated-tp4-engines-of-2": layout(
        COLOCATED,
        *megatron(tp=4),
        "policy.data_parallel_size=2",
        f"{ENGINE_TP}=2",
        "generation.num_engines=4",
    ),
    "colocated-tp8-one-engine-of-4": layout(
        COLOCATED,
        *megatron(tp=8),
        "policy.data_parallel_size=1",
        f"{ENGINE_TP}=4",
        "generation.num_engines=1",
    ),
    "colocated-tp8-two-nodes": layout(
        COLOCATED, *megatron(tp=8), "policy.data_parallel_size=2", f"{ENGINE_TP}=8", num_nodes=2
    ),
    "colocated-pp2-tp2-engine-on-every-gpu": layout(
        COLOCATED, *megatron(pp=2, tp=2), "policy.data_parallel_size=2", "generation.num_engines=8"
    ),
    "colocated-two-engines-on-a-gpu": layout(
        COLOCATED, "policy.data_parallel_size=2", "generation.num_engines=4"
    ),
    "colocated-ep8-four-nodes": layout(
        COLOCATED,
        *megatron(ep=8),
        *("policy.data_parallel_size=32", f"{ENGINE_TP}=4", "generation.num_engines=8"),
        num_nodes=4,
    ),
    "separate-tp4-engine-of-4-two-nodes": layout(
        *megatron(tp=4), *("policy.data_parallel_size=2", f"{ENGINE_TP}=4"), num_nodes=2
    ),
    "separate-fsdp": layout(
        "policy.backend=fsdp", "policy.fsdp_cfg.tensor_parallel_size=2", "policy.data_parallel_size=2"
    ),
} | {file.stem: recipe(file) for file in sorted(RECIPES, key=num_nodes)}


@pytest.mark.parametrize(
    "config",
    [
        *(pytest.param(config, id=name) for name, config in QUICK.items()),
        *(pytest.param(config, id=name, marks=OF_ALL_NODES) for name, config in SLOW.items()),
    ],
)
def test_every_process_starts_with_the_gpus_that_the_plan_gives_it(
    config: Callable[[Path], Config], nodes: Nodes, cluster: Cluster, tmp_path: Path
) -> None:
    cfg = config(tmp_path)
    nodes.at_least(cfg.cluster.num_nodes)
    places = placement(cfg)
    cluster.reserve(bundles(cfg, places), timeout_s=60)
    seen: list[Seen] = []
    for first in range(0, len(places), AT_ONCE):
        some = places[first : first + AT_ONCE]
        probes = [cluster.start(ActorSpec(place.actor, PROBE, num_cpus=0.1)) for place in some]
        seen += cluster.gather([probe.submit("look") for probe in probes], stage="start", timeout_s=240)

    by_plan: dict[tuple[int, int], tuple[str, str]] = {}
    for place, found in zip(places, seen, strict=True):
        for gpu, device in zip(place.gpus, found.gpus, strict=True):
            there = (found.node, device)
            assert by_plan.setdefault((place.node, gpu), there) == there, f"{place} saw {found}"
    assert len(set(by_plan.values())) == len(by_plan)  # different GPUs of the plan are different ones
    assert len({node for node, _ in by_plan.values()}) == len({node for node, _ in by_plan})
    users = Counter(found for one in seen for found in ((one.node, gpu) for gpu in one.gpus))
    assert all(count == 1 for count in users.values()) or cfg.cluster.placement is Placement.colocated


def test_two_runs_and_a_stranger_get_different_gpus(nodes: Nodes) -> None:
    first, second = Cluster(), Cluster()
    # On one node two GPUs of eight are left, on which the strangers take turns.
    three_gpus = Bundle({"worker": (0, 1, 2)}, num_cpus=1, num_gpus=3)
    try:
        for cluster in (first, second):
            cluster.reserve([three_gpus], timeout_s=60)
        seen = []
        for number, cluster in enumerate((first, second)):
            probe = cluster.start(ActorSpec("worker", PROBE), name=f"worker-of-{number}")
            seen += cluster.gather([probe.submit("look")], stage="start", timeout_s=60)
        stranger = ray.remote(num_gpus=1, num_cpus=0)(look)
        seen += ray.get([stranger.remote() for _ in range(NUM_STRANGERS)], timeout=60)
    finally:
        first.stop()
        second.stop()
    assert [len(one.gpus) for one in seen] == [3, 3] + [1] * NUM_STRANGERS
    taken = Counter((one.node, gpu) for one in seen[:2] for gpu in one.gpus)
    assert set(taken.values()) == {1}
    assert not taken.keys() & {(one.node, gpu) for one in seen[2:] for gpu in one.gpus}
