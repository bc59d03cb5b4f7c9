from __future__ import annotations

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.plan.host_memory import format_host_memory, host_memory, host_memory_problems
from nemo_like.plan.machine_rules import Machine
from nemo_like.plan.memory_timetable import GIB
from nemo_like.rules.rules import validate
from tests.unit.plan.test_memory_timetable import COLOCATED, OFFLOADS, SHARDED, qwen3_8b

NUM_PARAMETERS = 8_190_735_360  # of Qwen3 8B
DP8 = ("cluster.placement=colocated", "policy.data_parallel_size=8", "generation.num_engines=8")
TP1 = "policy.megatron_cfg.tensor_model_parallel_size=1"
IN_BFLOAT16 = 2 * NUM_PARAMETERS


def taken(*overrides: str) -> dict[str, int]:
    """What a run of Qwen3 8B on one node takes there."""
    (parts,) = host_memory(*qwen3_8b(*overrides)).values()
    return dict(parts)


def test_a_sharded_optimizer_is_gathered_once_however_many_ranks_share_it() -> None:
    gathered = {"moments gathered for a checkpoint": 12 * NUM_PARAMETERS}
    blocking = taken(*DP8, TP1, SHARDED, *OFFLOADS, "checkpointing.writing=blocking")
    assert blocking.items() >= gathered.items()
    background = taken(*DP8, TP1, SHARDED, *OFFLOADS, "checkpointing.writing=background")
    assert background == blocking | {"copy for a checkpoint in the background": IN_BFLOAT16}


def test_each_tensor_parallel_part_is_gathered_by_a_rank_of_its_own() -> None:
    for sizes in [("1", "8"), ("4", "2")]:
        tp, dp = sizes
        layout = [f"policy.megatron_cfg.tensor_model_parallel_size={tp}", f"policy.data_parallel_size={dp}"]
        gathered = taken(*DP8, *layout, SHARDED, *OFFLOADS)["moments gathered for a checkpoint"]
        assert gathered == pytest.approx(12 * NUM_PARAMETERS, rel=1e-6)


def test_a_worker_by_itself_has_no_number() -> None:
    parts = taken("policy.data_parallel_size=1", "policy.megatron_cfg.tensor_model_parallel_size=1", SHARDED)
    assert parts["moments gathered for a checkpoint"] == 12 * NUM_PARAMETERS


def test_what_waits_on_the_host_counts_for_every_process() -> None:
    parts = taken(*DP8, TP1, SHARDED, *OFFLOADS, "generation.vllm_cfg.enforce_eager=true")
    assert "weights of engines that sleep" not in parts  # others come before they generate again
    # Weights on each rank; masters and moments, divided over the eight.
    assert parts["what waits for its phase"] == pytest.approx(8 * IN_BFLOAT16 + 12 * NUM_PARAMETERS, rel=1e-6)
    assert "weights that are kept" not in parts
    with_graphs = taken(*DP8, TP1, SHARDED, *OFFLOADS, "generation.vllm_cfg.enforce_eager=false")
    assert with_graphs == parts | {"CUDA graphs of engines that sleep": 8 * GIB}
    with_changes = taken(*DP8, TP1, SHARDED, *OFFLOADS, "generation.weight_delta=true")
    assert with_changes["weights of engines that sleep"] == 8 * IN_BFLOAT16


@pytest.mark.parametrize(("placement", "copies"), [("swap_in_place", 1), ("host_copy", 2)])
def test_a_reference_policy_is_kept_by_every_worker(placement: str, copies: int) -> None:
    reference = ("loss_fn.reference_policy_kl_penalty=0.01", f"policy.reference_placement={placement}")
    parts = taken(*DP8, TP1, SHARDED, *OFFLOADS, *reference)
    assert parts["weights that are kept"] == 8 * copies * IN_BFLOAT16


def test_a_replicated_optimizer_is_copied_where_it_is_written_in_the_background() -> None:
    parts = taken("checkpointing.writing=background", "policy.megatron_cfg.use_distributed_optimizer=false")
    assert parts["copy for a checkpoint in the background"] == pytest.approx(14 * NUM_PARAMETERS, rel=1e-6)
    assert host_memory(*qwen3_8b("checkpointing.enabled=false")) == {}


def test_a_node_that_is_too_small_is_refused_with_what_takes_its_memory_and_remedies() -> None:
    given = (*COLOCATED, *OFFLOADS, SHARDED, "checkpointing.writing=background")
    cfg, models = qwen3_8b(*given)
    (problem,) = host_memory_problems(cfg, models, 128 * GIB)
    lines = format_host_memory(host_memory(cfg, models))
    (needed,) = [line.partition("at most ")[2].partition(":")[0] for line in lines]
    assert str(problem).startswith(
        f"cluster.host_memory_gib=128 is too little: the processes on node 0 need {needed} of its memory: "
        "what waits for its phase 122.1, moments gathered for a checkpoint 91.5, "
    )
    assert "; try offload_optimizer_for_logprob=false or " in str(problem)
    with pytest.raises(ConfigError, match=r"cluster\.host_memory_gib=128 is too little"):
        validate(qwen3_8b(*given, "cluster.host_memory_gib=128")[0], Machine.another)
    validate(qwen3_8b(*given, "cluster.host_memory_gib=1024")[0], Machine.another)
