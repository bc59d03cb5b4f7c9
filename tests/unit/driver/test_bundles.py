from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.cluster.placement import Bundle
from nemo_like.config.loader import load_config
from nemo_like.config.plan import Role, ray_gpus, roles
from nemo_like.config.schema import Config
from nemo_like.driver.bundles import bundles
from tests.unit.config.checkpoints import DEMO

Demo = Callable[..., Config]


@pytest.fixture
def demo(tmp_path: Path) -> Demo:
    return lambda *overrides: load_config(DEMO, [f"policy.model_name={tmp_path}", *overrides])


TP2_DP2 = ["policy.megatron_cfg.tensor_model_parallel_size=2", "policy.data_parallel_size=2"]


def test_a_tensor_parallel_group_is_one_bundle_and_so_is_an_engine(demo: Demo) -> None:
    (placed,) = bundles(demo(*TP2_DP2, "generation.vllm_cfg.tensor_parallel_size=2", "policy.device=cuda"))
    assert placed == [
        Bundle(("policy_worker-0", "policy_worker-1"), num_cpus=2, num_gpus=2),
        Bundle(("policy_worker-2", "policy_worker-3"), num_cpus=2, num_gpus=2),
        Bundle(("engine-0",), num_cpus=2, num_gpus=2),
        Bundle(("engine-1",), num_cpus=2, num_gpus=2),
    ]


def test_pipeline_stages_and_replicas_may_be_on_different_nodes(demo: Demo) -> None:
    (placed,) = bundles(demo(*TP2_DP2, "policy.megatron_cfg.pipeline_model_parallel_size=2"))
    assert [bundle.actors for bundle in placed[:-2]] == [
        tuple(f"policy_worker-{rank}" for rank in (first, first + 1)) for first in (0, 2, 4, 6)
    ]


def test_colocated_engines_are_dealt_to_the_groups_and_bring_their_cpus(demo: Demo) -> None:
    cfg = demo(*TP2_DP2, "generation.num_engines=3", "cluster.placement=colocated")
    (placed,) = bundles(cfg)
    assert placed == [
        Bundle(("policy_worker-0", "policy_worker-1", "engine-0", "engine-2"), num_cpus=4, num_gpus=0),
        Bundle(("policy_worker-2", "policy_worker-3", "engine-1"), num_cpus=3, num_gpus=0),
    ]


def test_engines_that_share_gpus_have_a_part_of_each_workers(demo: Demo) -> None:
    cfg = demo(*TP2_DP2, "generation.num_engines=3", "cluster.placement=colocated", "policy.device=cuda")
    (placed,) = bundles(cfg)
    assert [bundle.num_gpus for bundle in placed] == [2, 2]
    needs = roles(cfg)
    worker, engine = needs[Role.policy_worker].num_gpus, needs[Role.engine].num_gpus
    assert worker + engine == 1
    assert 2 * worker > 1
    assert ray_gpus(cfg) == 4


def test_a_single_worker_or_engine_has_no_number(demo: Demo) -> None:
    cfg = demo("policy.data_parallel_size=1", "generation.num_engines=1")
    assert [[bundle.actors for bundle in placed] for placed in bundles(cfg)] == [
        [("policy_worker",), ("engine",)]
    ]


def test_an_expert_parallel_group_shares_a_node_where_one_is_large_enough(demo: Demo) -> None:
    cfg = demo(*TP2_DP2, "policy.megatron_cfg.expert_model_parallel_size=4")
    best, else_ = bundles(cfg)
    workers = tuple(f"policy_worker-{rank}" for rank in range(4))
    assert [bundle.actors for bundle in best[:-2]] == [workers]
    assert [bundle.actors for bundle in else_[:-2]] == [workers[:2], workers[2:]]


def test_a_bundle_reads_as_a_sentence() -> None:
    assert str(Bundle(("a", "b"), num_cpus=2, num_gpus=4)) == "2 CPUs and 4 GPUs on one node for a, b"
    assert str(Bundle(("a",), num_cpus=1, num_gpus=0)) == "1 CPUs on one node for a"
