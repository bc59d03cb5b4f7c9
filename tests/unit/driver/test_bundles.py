from __future__ import annotations

from pathlib import Path

from nemo_like.cluster.placement import Bundle
from nemo_like.configuration import load_config
from nemo_like.driver.bundles import bundles
from nemo_like.plan.places import placement
from tests.unit.config.checkpoints import DEMO

TP2_DP2 = ["policy.megatron_cfg.tensor_model_parallel_size=2", "policy.data_parallel_size=2"]


def test_a_bundle_has_what_its_node_needs(tmp_path: Path) -> None:
    overrides = [
        *(f"policy.model_name={tmp_path}", *TP2_DP2, "generation.vllm_cfg.tensor_parallel_size=2"),
        *("policy.device=cuda", "cluster.gpus_per_node=4", "cluster.num_nodes=2"),
    ]
    cfg = load_config(DEMO, overrides)
    assert bundles(cfg, placement(cfg)) == [
        Bundle({f"policy_worker-{rank}": (rank,) for rank in range(4)}, num_cpus=4, num_gpus=4),
        Bundle({"engine-0": (0, 1), "engine-1": (2, 3)}, num_cpus=4, num_gpus=4),
    ]


def test_a_reward_model_has_a_cpu_and_a_gpu_beside_the_others(tmp_path: Path) -> None:
    scored = "{model_name: /rm, device: cuda, precision: bfloat16, max_length: null}"
    overrides = [
        *(f"policy.model_name={tmp_path}", "policy.data_parallel_size=1", "generation.num_engines=1"),
        *("policy.device=cuda", "cluster.gpus_per_node=4", "env.arithmetic.num_actors=2"),
        *("env.arithmetic.kind=reward_model", f"++env.arithmetic.options={scored}"),
    ]
    cfg = load_config(DEMO, overrides)
    actors = {"policy_worker": (0,), "engine": (1,)}
    actors |= {"reward_model-arithmetic-0": (2,), "reward_model-arithmetic-1": (3,)}
    assert bundles(cfg, placement(cfg)) == [Bundle(actors, num_cpus=4, num_gpus=4)]


def test_a_bundle_reads_as_a_sentence() -> None:
    both = Bundle({"a": (0, 1), "b": (2, 3)}, num_cpus=2, num_gpus=4)
    assert str(both) == "2 CPUs and 4 GPUs on one node for a, b"
    assert str(Bundle({"a": ()}, num_cpus=1, num_gpus=0)) == "1 CPUs on one node for a"
