from __future__ import annotations

from collections.abc import Callable

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.generation.options import WeightTransport
from nemo_like.plan.derived import shares_gpus, weight_transport
from nemo_like.rules.rules import validate

Demo = Callable[..., Config]

ON_GPU = ("policy.device=cuda", "cluster.gpus_per_node=8", "generation.vllm_cfg.kv_cache_gib=null")
COLOCATED = (*ON_GPU, "cluster.placement=colocated")
TWO_NODES = (
    *("cluster.address=auto", "cluster.num_nodes=2", "generation.vllm_cfg.tensor_parallel_size=2"),
    "generation.vllm_cfg.num_nodes=2",
)


def problems(cfg: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        (
            [*COLOCATED, "generation.weight_transport=collective"],
            "generation.weight_transport=collective",
            "NCCL carries nothing between two processes on one GPU",
        ),
        (
            [*COLOCATED, "generation.vllm_cfg.tensor_parallel_size=4"],
            "generation.vllm_cfg.tensor_parallel_size=4",
            "must be at most 2 with cluster.placement=colocated",
        ),
        (
            [*ON_GPU, "cluster.gpus_per_node=3"],
            "cluster.num_nodes=1",
            "must be at least 2: 2 policy workers of 1 GPU and 2 engines of 1 do not fit",
        ),
        (
            ["grpo.max_staleness=1", "cluster.placement=colocated"],
            "grpo.max_staleness=1",
            "with cluster.placement=colocated they share its processors or GPUs",
        ),
        (["grpo.max_staleness=-1"], "grpo.max_staleness=-1", "must be at least 0"),
        (
            [*TWO_NODES, "generation.vllm_cfg.tensor_parallel_size=1"],
            "generation.vllm_cfg.num_nodes=2",
            "must divide the 1 processes of an engine (tensor_parallel_size x pipeline_parallel_size), since "
            "each node has equally many; try 1",
        ),
        (
            [*TWO_NODES, "generation.weight_transport=shared_memory"],
            "generation.weight_transport=shared_memory",
            "maps memory of one node; set generation.vllm_cfg.num_nodes=1",
        ),
        (
            [*TWO_NODES, "policy.lora.enabled=true", "generation.lora_sync=adapter"],
            "generation.lora_sync=adapter",
            "hands adapters over in memory, which processes on other nodes do not see",
        ),
        (["cluster.num_nodes=2"], "cluster.num_nodes=2", "must be 1 with cluster.address=null"),
        (
            [*ON_GPU, "generation.weight_transport=shared_memory"],
            "generation.weight_transport=shared_memory",
            "maps host memory",
        ),
        (
            ["generation.weight_transport=cuda_ipc"],
            "generation.weight_transport=cuda_ipc",
            "maps a GPU's memory",
        ),
    ],
)
def test_what_cannot_share_a_gpu_or_a_memory_is_refused(
    demo: Demo, overrides: list[str], key: str, reason: str
) -> None:
    (problem,) = [text for text in problems(demo(*overrides)) if text.startswith(key)]
    assert reason in problem


def test_only_engines_beside_policy_workers_on_gpus_share_them(demo: Demo) -> None:
    assert shares_gpus(demo(*COLOCATED))
    assert not shares_gpus(demo(*ON_GPU))
    assert not shares_gpus(demo("cluster.placement=colocated"))
    assert not shares_gpus(demo(*COLOCATED, "rollout.generate_only=true"))


def test_weights_go_to_a_shared_gpu_by_its_memory_unless_said_otherwise(demo: Demo) -> None:
    assert weight_transport(demo(*COLOCATED)) is WeightTransport.cuda_ipc
    assert weight_transport(demo(*ON_GPU)) is WeightTransport.auto
    assert weight_transport(demo(*ON_GPU, "generation.weight_transport=cuda_ipc")) is WeightTransport.cuda_ipc
