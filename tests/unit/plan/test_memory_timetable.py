from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like.cluster.stage import GPU_STAGES, EngineHolds, Stage
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.plan.machine_rules import Machine
from nemo_like.plan.memory_timetable import (
    GIB,
    MemoryTimetable,
    format_timetable,
    gpu_stages,
    memory_problems,
    memory_timetable,
)
from nemo_like.plan.run_models import RunModels, run_models
from nemo_like.rules.rules import validate
from tests.unit.config.checkpoints import DEMO, REPOSITORY

SIZE = 79 * GIB
COLOCATED = ("cluster.placement=colocated", "policy.data_parallel_size=2", "generation.num_engines=8")
SHARDED = "policy.megatron_cfg.use_distributed_optimizer=true"
OFFLOADS = ("policy.offload_optimizer_for_logprob=true", "policy.offload_parameters_between_phases=true")


def qwen3_8b(*overrides: str) -> tuple[Config, RunModels]:
    cfg = load_config(REPOSITORY / "recipes" / "grpo-qwen3-8b-1n8g.yaml", overrides)
    return cfg, run_models(cfg)


def problems(cfg: Config, models: RunModels, size: int = SIZE) -> list[str]:
    return [str(problem) for problem in memory_problems(cfg, models, size)]


def test_an_engine_of_its_own_has_its_share_always_and_buckets_during_a_transfer() -> None:
    timetable = memory_timetable(*qwen3_8b(), SIZE)
    share = int(0.85 * SIZE)
    buckets = 2 * 256 * 2**20 + 151936 * 4096 * 2  # the embedding is larger than a layer
    assert timetable.actors((0, 4)) == ["engine-0"]
    assert timetable.bytes_in((0, 4), Stage.policy_training) == share
    assert timetable.bytes_in((0, 4), Stage.weight_sync) == share + buckets
    assert timetable.peak((0, 4)) is Stage.weight_sync
    assert timetable.bytes_in((0, 0), Stage.engine_start) == 0


# Four bytes for each of 256 samples and each token, and a bit for each, in words of four bytes.
COUNTS = 256 * (151936 * 4 + 151936 // 8)


@pytest.mark.parametrize(("is_eager", "graphs"), [(True, {}), (False, {"graphs": GIB})])
def test_of_an_engine_that_sleeps_a_context_and_counts_of_tokens_stay_and_graphs_come_back_with_the_weights(
    is_eager: bool, graphs: dict[str, int]
) -> None:
    eager = f"generation.vllm_cfg.enforce_eager={str(is_eager).lower()}"
    timetable = memory_timetable(*qwen3_8b(*COLOCATED, *OFFLOADS, eager), SIZE)
    asleep = {"context": GIB, "token counts": COUNTS}
    assert of_stage(timetable, "engine-0", Stage.logprobs) == asleep
    woken = of_stage(timetable, "engine-0", Stage.weight_sync)
    assert woken.keys() == {"weights", "buckets", *asleep, *graphs}
    assert woken.items() >= {**asleep, **graphs}.items()


def test_what_shares_a_gpu_adds_up_in_each_stage() -> None:
    cfg, models = qwen3_8b(*COLOCATED, *OFFLOADS)
    timetable = memory_timetable(cfg, models, SIZE)
    assert timetable.actors((0, 0)) == ["engine-0", "policy_worker-0"]
    generation = {(one.actor, one.what) for one in timetable.by_gpu[0, 0][Stage.generation]}
    assert generation == {
        ("policy_worker-0", "context"),
        ("policy_worker-0", "buckets"),
        ("engine-0", "weights"),
        ("engine-0", "KV cache and work space"),
    }
    training = {one.what for one in timetable.by_gpu[0, 0][Stage.policy_training]}
    of_worker = {"weights", "gradients", "optimizer", "activations", "buckets", "context"}
    assert training == {*of_worker, "token counts"}
    assert problems(cfg, models) == []


def test_what_does_not_fit_is_told_with_stage_holdings_and_remedies() -> None:
    (problem,) = problems(*qwen3_8b(*COLOCATED))
    assert problem.startswith(
        "cluster.gpu_memory_gib=79 is too little: GPU 0 of node 0 needs 104.0 of 79.0 GiB in stage "
        "generation: engine-0 KV cache and work space 51.9, policy_worker-0 optimizer 22.9, "
    )
    assert problem.endswith(
        "; try a lower generation.vllm_cfg.gpu_memory_utilization or "
        "policy.offload_optimizer_for_logprob=true or policy.offload_parameters_between_phases=true"
    )


def test_training_that_does_not_fit_names_recomputation_and_the_optimizer() -> None:
    (problem,) = problems(*qwen3_8b("policy.sequence_packing.train_mb_tokens=65536"))
    assert "in stage policy_training: policy_worker-0 activations" in problem
    recomputing = "policy.megatron_cfg.activation_checkpointing=true"
    assert f"try {recomputing} or micro-batches of fewer tokens or " in problem
    assert "use_distributed_optimizer=true" in problem
    more = ("policy.sequence_packing.train_mb_tokens=1048576", recomputing)
    (problem,) = problems(*qwen3_8b(*more))
    assert "in stage policy_training: policy_worker-0 activations" in problem
    assert "try micro-batches of fewer tokens or " in problem and recomputing not in problem


def test_an_engine_needs_room_for_its_weights_and_one_sample() -> None:
    (problem,) = problems(*qwen3_8b("generation.vllm_cfg.gpu_memory_utilization=0.15"), SIZE)
    assert problem.startswith(
        "generation.vllm_cfg.gpu_memory_utilization=0.15 gives an engine 11.8 GiB of each GPU, but its "
        "weights and the KV cache of one sample need 15.8 GiB"
    )


def test_the_rules_check_the_size_that_the_configuration_names() -> None:
    cfg, _ = qwen3_8b(*COLOCATED)
    with pytest.raises(ConfigError, match=r"needs 104\.0 of 79\.0 GiB in stage generation"):
        validate(cfg, Machine.another)
    validate(qwen3_8b(*COLOCATED, *OFFLOADS)[0], Machine.another)
    validate(qwen3_8b(*COLOCATED, "cluster.gpu_memory_gib=null")[0], Machine.another)


def test_the_table_has_every_gpu_and_all_stages_of_the_fullest_of_each_kind() -> None:
    lines = format_timetable(memory_timetable(*qwen3_8b(), SIZE))
    assert [line for line in lines if line.startswith("  node 0 GPU 4 ")] == [
        "  node 0 GPU 4   engine-0                            at most 68.8 GiB, in weight_sync"
    ]
    assert sum(line.startswith("  node 0 GPU") for line in lines) == 8
    assert [line.split()[:6] for line in lines if line.startswith("GiB")] == [
        ["GiB", "on", "node", "0", "GPU", "0"],
        ["GiB", "on", "node", "0", "GPU", "4"],
    ]
    (total, _) = (line for line in lines if line.strip().startswith("in all"))
    assert len(total.split()) == 2 + len(GPU_STAGES) - 3  # without those of a critic and of a teacher


def test_without_a_size_an_engine_counts_with_its_weights_alone() -> None:
    timetable = memory_timetable(*qwen3_8b(), None)
    assert timetable.bytes_in((0, 4), Stage.generation) == 8_190_735_360 * 2 + GIB


def test_eight_bits_halve_an_engines_layers_and_not_its_embeddings() -> None:
    timetable = memory_timetable(*qwen3_8b("generation.vllm_cfg.quantization=fp8"), None)
    embeddings = 2 * 151936 * 4096
    assert timetable.bytes_in((0, 4), Stage.generation) == 8_190_735_360 + embeddings + GIB


def test_a_run_on_the_cpu_has_no_timetable() -> None:
    cfg = load_config(DEMO, ["policy.model_name=none"])
    _, models = qwen3_8b()
    timetable = memory_timetable(cfg, models, SIZE)
    assert timetable.by_gpu == {}
    assert format_timetable(timetable) == []
    assert problems(cfg, models) == []


CRITIC = ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false")
CRITIC_OFFLOADS = ("value.offload_optimizer_for_logprob=true", "value.offload_parameters_between_phases=true")


def of_stage(timetable: MemoryTimetable, actor: str, stage: Stage) -> dict[str, int]:
    held = timetable.by_gpu[0, 0][stage]
    return {one.what: one.num_bytes for one in held if one.actor == actor}


def test_a_run_has_the_stages_of_a_critic_only_with_one_and_engines_sleep_in_them() -> None:
    without, _ = qwen3_8b()
    with_critic, _ = qwen3_8b(*CRITIC)
    of_critic = {Stage.values, Stage.value_training}
    assert set(gpu_stages(with_critic)) - set(gpu_stages(without)) == of_critic
    for stage in (Stage.values, Stage.value_training):
        assert stage.engine_holds is EngineHolds.nothing


def test_a_critic_holds_what_a_policy_of_its_model_would_but_sends_nothing() -> None:
    cfg, models = qwen3_8b(*COLOCATED, *OFFLOADS, *CRITIC, *CRITIC_OFFLOADS)
    timetable = memory_timetable(cfg, models, SIZE)
    assert timetable.actors((0, 0)) == ["engine-0", "policy_worker-0", "value_worker-0"]
    policy, critic = "policy_worker-0", "value_worker-0"
    for theirs, own in (
        (Stage.logprobs, Stage.values),
        (Stage.policy_training, Stage.value_training),
    ):
        of_policy = of_stage(timetable, policy, theirs)
        assert of_policy.pop("buckets") == 2 * 256 * 2**20
        of_critic = of_stage(timetable, critic, own)
        assert of_critic.keys() == of_policy.keys()
        # In the place of the output layer, divided over 4 ranks, there is one output.
        assert of_policy["weights"] - of_critic["weights"] == 2 * (151936 - 1) * 4096 // 4
        # What is offloaded leaves the GPU while the other computes.
        assert set(of_stage(timetable, critic, theirs)) == {"context"}
        assert set(of_stage(timetable, policy, own)) == {"context", "buckets"}
        assert of_stage(timetable, "engine-0", own) == {"context": GIB, "token counts": COUNTS}
    assert "optimizer" in of_stage(timetable, critic, Stage.value_training)
    assert of_stage(timetable, critic, Stage.engine_start) == {}
    assert problems(cfg, models) == []


def test_a_critic_that_stays_on_the_gpu_is_counted_in_every_stage() -> None:
    cfg, models = qwen3_8b(*COLOCATED, *OFFLOADS, *CRITIC, *CRITIC_OFFLOADS, "value.precision=bfloat16")
    stays = qwen3_8b(*COLOCATED, *OFFLOADS, *CRITIC, *(f"{key[:-4]}false" for key in CRITIC_OFFLOADS))[0]
    leaves = memory_timetable(cfg, models, SIZE)
    timetable = memory_timetable(stays, models, SIZE)
    for stage in (Stage.generation, Stage.logprobs, Stage.policy_training):
        held = of_stage(timetable, "value_worker-0", stage)
        added = held["weights"] + held["gradients"] + held["optimizer"]
        assert timetable.bytes_in((0, 0), stage) == leaves.bytes_in((0, 0), stage) + added
    (problem,) = problems(stays, models)
    assert "value_worker-0 optimizer 21.1" in problem
    assert "value.offload_optimizer_for_logprob=true" in problem
    with pytest.raises(ConfigError, match=r"value_worker-0 optimizer 21\.1"):
        validate(stays, Machine.another)


def test_the_weights_of_a_critic_in_another_stage_are_told_to_leave() -> None:
    stays = ("value.offload_optimizer_for_logprob=true", "value.offload_parameters_between_phases=false")
    cfg, models = qwen3_8b(*COLOCATED, *OFFLOADS, *CRITIC, *stays)
    (problem,) = problems(cfg, models, 40 * GIB)
    assert "in stage policy_training" in problem and "value_worker-0 weights" in problem
    assert "value.offload_parameters_between_phases=true" in problem


def test_a_critic_on_gpus_of_its_own_has_them_to_itself() -> None:
    cfg, models = qwen3_8b(*CRITIC, "generation.num_engines=1", "cluster.num_nodes=2", "cluster.address=auto")
    timetable = memory_timetable(cfg, models, SIZE)
    owners = [timetable.actors(gpu) for gpu in timetable.by_gpu]
    assert ["value_worker-0"] in owners and all(len(actors) == 1 for actors in owners)
    lines = format_timetable(timetable)
    (title,) = {line[42:] for line in lines if line.startswith("GiB on")}
    assert title.split() == ["engines", "policy", "sync", "generate", "logprobs", "values", "critic", "train"]


TEACHER = ("teacher=default", "teacher.model_name=models/Qwen3-8B", "loss_fn.kind=distillation")
MORE_NODES = ("generation.num_engines=1", "cluster.num_nodes=2", "cluster.address=auto")


def of_actor(timetable: MemoryTimetable, actor: str, stage: Stage) -> dict[str, int]:
    (gpu,) = (gpu for gpu in timetable.by_gpu if timetable.actors(gpu) == [actor])
    return {one.what: one.num_bytes for one in timetable.by_gpu[gpu][stage]}


def test_a_teachers_worker_holds_weights_and_the_activations_of_a_forward_pass() -> None:
    cfg, models = qwen3_8b(*TEACHER, *MORE_NODES)
    timetable = memory_timetable(cfg, models, SIZE)
    scoring = of_actor(timetable, "teacher_worker-0", Stage.teacher_logprobs)
    of_policy = of_actor(timetable, "policy_worker-0", Stage.logprobs)
    assert scoring == {what: of_policy[what] for what in ("weights", "activations", "context")}
    training = of_actor(timetable, "teacher_worker-0", Stage.policy_training)
    assert training == {what: of_policy[what] for what in ("weights", "context")}
    assert problems(cfg, models) == []
    (title,) = {line[42:] for line in format_timetable(timetable) if line.startswith("GiB on")}
    assert title.split() == ["engines", "policy", "sync", "generate", "logprobs", "teacher", "train"]


def test_a_teacher_that_is_too_large_for_its_gpus_is_refused() -> None:
    large = ("teacher.model_name=models/Qwen3-30B-A3B", "teacher.data_parallel_size=1")
    single = ("megatron_cfg.tensor_model_parallel_size=1", "megatron_cfg.sequence_parallel=false")
    cfg, models = qwen3_8b(*TEACHER, *large, *(f"teacher.{key}" for key in single), *MORE_NODES)
    (problem,) = problems(cfg, models, 40 * GIB)
    assert (
        "teacher_worker weights 56.9" in problem and "a larger tensor- or pipeline-parallel size" in problem
    )


def test_an_engine_that_scores_for_a_teacher_has_its_share_and_needs_room_in_it() -> None:
    single = ("data_parallel_size=1", "megatron_cfg.tensor_model_parallel_size=1", "scored_by=engine")
    by_engine = (*TEACHER, *(f"teacher.{key}" for key in single), *MORE_NODES)
    cfg, models = qwen3_8b(*by_engine)
    held = of_actor(memory_timetable(cfg, models, SIZE), "teacher_worker", Stage.policy_training)
    assert sum(held.values()) == int(0.85 * SIZE) and held["weights"] == 8_190_735_360 * 2
    assert problems(cfg, models) == []
    small, _ = qwen3_8b(*by_engine, "generation.vllm_cfg.gpu_memory_utilization=0.15")
    (_, problem) = problems(small, models)
    assert "gives the teacher's engine 11.8 GiB" in problem
    assert "raise it, or set teacher.scored_by=workers" in problem


def test_a_reward_model_holds_its_weights_on_a_gpu_of_its_own(tmp_path: Path) -> None:
    header = json.dumps({"score.weight": {"dtype": "BF16", "shape": [1, 4096], "data_offsets": [0, 8192]}})
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    options = f"{{model_name: {tmp_path}, device: cuda, precision: bfloat16, max_length: null}}"
    scored = ("env@env.scorer=exact_match", "env.scorer.kind=reward_model", f"++env.scorer.options={options}")
    cfg, models = qwen3_8b(*scored, "data.default.env=scorer", *MORE_NODES)
    timetable = memory_timetable(cfg, models, SIZE)
    for stage in gpu_stages(cfg):
        assert of_actor(timetable, "reward_model", stage) == {"weights": 2 * 4096, "context": GIB}


def test_what_leaves_the_gpu_is_made_on_it_at_the_start() -> None:
    """With two replicas a rank has half of the optimizer state of its part of the model. Gradients of 4 bytes
    and the buffer of 2 bytes into which weights move are as much as that."""
    timetable = memory_timetable(*qwen3_8b(*COLOCATED, *OFFLOADS, SHARDED), SIZE)
    held = {one.what: one.num_bytes for one in timetable.by_gpu[0, 0][Stage.policy_start]}
    training = {one.what: one.num_bytes for one in timetable.by_gpu[0, 0][Stage.policy_training]}
    assert held["start"] == training["gradients"] + training["weights"]
    assert held["start"] == pytest.approx(training["optimizer"], rel=1e-6)
