from __future__ import annotations

from collections.abc import Callable

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.data_plane.storage_kinds import mooncake_cpu
from nemo_like.rules.rules import validate
from tests.unit.config.checkpoints import SCORED

Demo = Callable[..., Config]


@pytest.fixture
def no_missing_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that has what Mooncake needs."""
    monkeypatch.setattr(mooncake_cpu, "_MOONCAKE_LIBRARIES", {})


def problems(cfg: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    return [str(problem) for problem in caught.value.problems]


def test_the_demo_is_valid(demo: Demo) -> None:
    validate(demo())


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("grpo.num_prompts_per_step=0", "must be at least 1"),
        ("grpo.max_num_steps=0", "must be at least 1"),
        ("grpo.seed=-1", "must be at least 0"),
        ("grpo.val_period=-1", "must be at least 0"),
        ("grpo.max_val_samples=0", "must be at least 1"),
        ("generation.validation.temperature=-0.5", "must be at least 0 and at most 2"),
        ("loss_fn.ratio_clip_min=0.0", "must be above 0 and below 1"),
        ("loss_fn.ratio_clip_min=1.0", "must be above 0 and below 1"),
        ("loss_fn.ratio_clip_max=-0.2", "must be above 0"),
        ("loss_fn.ratio_clip_c=1.0", "must be above 1; 3 is usual; null switches the dual clip off"),
        ("loss_fn.reference_policy_kl_penalty=-0.1", "must be at least 0"),
        ("policy.data_parallel_size=0", "must be at least 1"),
        ("policy.train_global_batch_size=0", "must be at least 1"),
        ("policy.train_micro_batch_size=0", "must be at least 1"),
        ("policy.logprob_batch_size=0", "must be at least 1"),
        ("policy.sequence_packing.train_mb_tokens=0", "must be at least 1"),
        ("policy.dynamic_batching.sequence_length_round=0", "must be at least 1"),
        ("policy.max_grad_norm=0.0", "must be above 0"),
        ("policy.max_grad_norm=nan", "must be above 0"),
        ("policy.megatron_cfg.tensor_model_parallel_size=0", "must be at least 1"),
        ("policy.megatron_cfg.pipeline_model_parallel_size=-2", "must be at least 1"),
        ("policy.optimizer.lr=0.0", "must be above 0"),
        ("policy.optimizer.weight_decay=-0.1", "must be at least 0"),
        ("policy.optimizer.adam_beta1=1.0", "must be at least 0 and below 1"),
        ("policy.optimizer.adam_beta2=-0.1", "must be at least 0 and below 1"),
        ("policy.optimizer.adam_eps=0.0", "must be above 0"),
        ("policy.scheduler.warmup_updates=-1", "must be at least 0"),
        ("policy.scheduler.decay_updates=0", "must be at least 1"),
        ("policy.scheduler.min_lr=-0.1", "must be at least 0"),
        ("data_plane.num_storage_units=0", "must be at least 1"),
        ("data_plane.capacity_gib=0.0", "must be above 0; null is no limit"),
        ("data_plane.mooncake_cfg.segment_gib=0.0", "must be above 0"),
        ("data_plane.mooncake_cfg.buffer_mib=0", "must be at least 1"),
        (
            "data_plane.mooncake_cfg.master_port=70000",
            "must be at least 1 and at most 65535; null is a free port",
        ),
        ("generation.num_engines=0", "must be at least 1"),
        ("generation.max_new_tokens=0", "must be at least 1"),
        ("generation.vllm_cfg.tensor_parallel_size=0", "must be at least 1"),
        ("generation.vllm_cfg.max_num_seqs=0", "must be at least 1"),
        ("generation.vllm_cfg.kv_cache_gib=0.0", "must be above 0"),
        ("generation.vllm_cfg.gpu_memory_utilization=1.5", "must be above 0 and at most 1"),
        ("data.train.digits=4", "must be at least 1 and at most 3"),
        ("env.arithmetic.num_actors=0", "must be at least 1"),
        ("env.arithmetic.timeout_s=0.0", "must be above 0 and finite"),
        ("logger.num_sample_answers=-1", "must be at least 0"),
        ("cluster.gpus_per_node=-1", "must be at least 0"),
        ("cluster.num_nodes=0", "must be at least 1"),
        ("cluster.start_timeout_s=0.0", "must be above 0"),
        ("cluster.stage_timeout_s=-1.0", "must be above 0"),
        ("cluster.stage_timeouts_s.checkpoint=0.0", "must be above 0"),
        ("data_plane.timeout_s=0.0", "must be above 0"),
        ("data_plane.max_open_partitions=0", "must be at least 1"),
    ],
)
def test_a_number_outside_its_range_names_key_value_and_range(demo: Demo, argument: str, rule: str) -> None:
    assert f"{argument} {rule}" in problems(demo(argument))


def test_a_group_of_one_is_refused(demo: Demo) -> None:
    (problem,) = problems(demo("grpo.num_generations_per_prompt=1"))
    assert problem == (
        "grpo.num_generations_per_prompt=1 must be at least 2; "
        "a response is judged against the others of its group; 8 or 16 are usual"
    )


def test_a_greedy_rollout_is_refused(demo: Demo) -> None:
    (problem,) = problems(demo("generation.temperature=0"))
    assert "generation.temperature=0.0 must be above 0 and at most 2; training samples must vary" in problem
    (problem,) = problems(demo("generation.temperature=2.5"))
    assert "generation.temperature=2.5 must be above 0 and at most 2" in problem


def test_a_mismatch_maximum_that_ends_every_run_is_refused(demo: Demo) -> None:
    (problem,) = problems(demo("grpo.max_token_mult_prob_error=1.0"))
    assert "grpo.max_token_mult_prob_error=1.0 must be above 1" in problem


def test_a_mismatch_threshold_that_masks_everything_is_refused(demo: Demo) -> None:
    (problem,) = problems(demo(SCORED, "grpo.seq_logprob_error_threshold=1.0"))
    assert "grpo.seq_logprob_error_threshold=1.0 must be above 1" in problem


def test_leave_one_out_of_two_cannot_be_normalised(demo: Demo) -> None:
    pair = ("grpo.num_generations_per_prompt=2", "grpo.use_leave_one_out_baseline=true")
    (problem,) = problems(demo(*pair))
    assert problem.startswith("grpo.num_generations_per_prompt=2 must be at least 3")
    assert "the one other reward has no standard deviation" in problem
    validate(demo(*pair, "grpo.normalize_rewards=false"))
    validate(demo("grpo.num_generations_per_prompt=4", "grpo.use_leave_one_out_baseline=true"))


def test_a_batch_size_that_does_not_divide_the_step_proposes_its_neighbours(demo: Demo) -> None:
    (problem,) = problems(demo("policy.train_global_batch_size=500"))
    assert problem == (
        "policy.train_global_batch_size=500 must divide the N = 128 prompts x 8 generations = 1024 samples "
        "of a step and be a multiple of policy.data_parallel_size=2; try 256 or 512"
    )


def test_a_batch_size_must_be_a_multiple_of_the_data_parallel_ranks(demo: Demo) -> None:
    (problem,) = problems(
        demo("policy.data_parallel_size=8", "policy.train_global_batch_size=4", "grpo.max_num_steps=2")
    )
    assert problem.endswith("be a multiple of policy.data_parallel_size=8; try 8")


def test_a_step_that_no_batch_size_fits_proposes_numbers_of_prompts(demo: Demo) -> None:
    (problem,) = problems(demo("policy.data_parallel_size=3"))
    assert problem.endswith("N is no multiple of 3: try grpo.num_prompts_per_step=126 or 129")


def test_sequence_parallel_needs_tensor_parallel_and_padded_lengths(demo: Demo) -> None:
    (problem,) = problems(demo("policy.megatron_cfg.sequence_parallel=true"))
    assert problem.startswith(
        "policy.megatron_cfg.sequence_parallel=true needs policy.megatron_cfg.tensor_model"
    )
    both = ("policy.megatron_cfg.sequence_parallel=true", "policy.megatron_cfg.tensor_model_parallel_size=2")
    validate(demo(*both))
    (problem,) = problems(demo(*both, "policy.max_total_sequence_length=33"))
    assert problem.endswith(
        "must be a multiple of 2, into which sequence and context parallelism cut it; try 32 or 34"
    )


def test_the_response_must_leave_room_for_the_prompt(demo: Demo) -> None:
    (problem,) = problems(demo("generation.max_new_tokens=32"))
    assert problem == (
        "generation.max_new_tokens=32 must be below policy.max_total_sequence_length=32, "
        "which holds the prompt too; raise policy.max_total_sequence_length, or try at most 16"
    )


def test_an_answer_that_cannot_be_written_out_is_refused(demo: Demo) -> None:
    (problem,) = problems(demo("generation.max_new_tokens=3"))
    assert problem == (
        "generation.max_new_tokens=3 cannot hold the answers of data, which have 3 tokens, and the end; try 4"
    )
    (problem,) = problems(demo("policy.max_total_sequence_length=9"))
    assert problem.endswith("cannot hold a prompt of 6 tokens and max_new_tokens=4; try 10 or more")


def test_sampling_must_be_from_the_full_distribution(demo: Demo) -> None:
    cut_off, top = problems(demo("generation.top_p=0.9", "generation.top_k=10"))
    assert cut_off.startswith(
        "generation.top_p=0.9 must be 1.0 in training: the engine's log-probs would be renormalised"
    )
    assert top.startswith("generation.top_k=10 must be null in training: the engine's log-probs")


def test_engines_without_prompts_are_refused(demo: Demo) -> None:
    (problem,) = problems(demo("generation.num_engines=129"))
    assert problem.endswith("is more than grpo.num_prompts_per_step=128, so engines would idle; try 128")


def test_an_engine_on_cpu_needs_the_size_of_its_cache(demo: Demo) -> None:
    (problem,) = problems(demo("generation.vllm_cfg.kv_cache_gib=null"))
    assert problem.startswith("generation.vllm_cfg.kv_cache_gib=null must be a size with policy.device=cpu")


def test_a_schedule_that_ends_before_the_run_is_refused(demo: Demo) -> None:
    (problem,) = problems(demo("grpo.max_num_steps=100"))
    assert problem == (
        "policy.scheduler.decay_updates=640 reaches a learning rate of 0 before the last of 800 updates; "
        "set it to 800, or to ${updates_of_run:policy}, which follows grpo.max_num_steps; or "
        "policy.scheduler.min_lr above 0"
    )
    validate(demo("grpo.max_num_steps=100", "policy.scheduler.min_lr=1e-5"))
    validate(demo("grpo.max_num_steps=100", "policy.scheduler.decay_style=constant"))
    validate(demo("grpo.max_num_steps=2"))


def test_a_schedule_must_decay_after_its_warm_up_and_downwards(demo: Demo) -> None:
    (problem,) = problems(demo("policy.scheduler.warmup_updates=640"))
    assert problem.startswith("policy.scheduler.decay_updates=640 must be above warmup_updates=640")
    (problem,) = problems(demo("policy.scheduler.min_lr=0.01"))
    assert problem == "policy.scheduler.min_lr=0.01 must be at most policy.optimizer.lr=0.001"


def test_a_capacity_beyond_what_mooncake_lends_is_refused(demo: Demo, no_missing_libraries: None) -> None:
    mooncake = ("data_plane.backend=mooncake_cpu", "data_plane.mooncake_cfg.segment_gib=0.5")
    (problem,) = problems(demo(*mooncake, "data_plane.capacity_gib=2"))
    assert problem == (
        "data_plane.capacity_gib=2 is more than the 0.5 GiB of data_plane.num_storage_units=1 x "
        "data_plane.mooncake_cfg.segment_gib=0.5; raise one of these two, or set capacity_gib to null"
    )
    validate(demo(*mooncake, "data_plane.capacity_gib=2", "data_plane.num_storage_units=4"))
    validate(demo("data_plane.capacity_gib=2"))


def test_rdma_devices_over_tcp_are_refused(demo: Demo, no_missing_libraries: None) -> None:
    devices = ("data_plane.backend=mooncake_cpu", "data_plane.mooncake_cfg.rdma_devices=mlx5_0")
    (problem,) = problems(demo(*devices))
    assert problem.startswith(
        "data_plane.mooncake_cfg.rdma_devices=mlx5_0 has no meaning with data_plane.mooncake_cfg.protocol=tcp"
    )


def test_all_problems_are_told_at_once(demo: Demo) -> None:
    found = problems(
        demo(
            "generation.temperature=0",
            "policy.train_global_batch_size=500",
            "policy.megatron_cfg.tensor_model_parallel_size=3",
            "cluster.num_cpus=1",
            "policy.data_parallel_size=0",
        )
    )
    text = "\n".join(found)
    for key in ("temperature", "tensor_model_parallel_size", "cluster.num_cpus", "data_parallel_size=0"):
        assert key in text
    assert "train_global_batch_size" not in text  # cannot be judged while data_parallel_size is 0


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        (
            "logger.trace_steps=[3,81]",
            "logger.trace_steps=[3, 81] must name steps from 1 to grpo.max_num_steps=80",
        ),
        (
            "logger.profile.steps=[0]",
            "logger.profile.steps=[0] must name steps from 1 to grpo.max_num_steps=80",
        ),
        ("logger.nvtx_ranges=true", "logger.nvtx_ranges=true needs policy.device=cuda"),
    ],
)
def test_what_cannot_be_observed_is_refused(demo: Demo, argument: str, rule: str) -> None:
    (problem,) = problems(demo(argument))
    assert problem.startswith(rule)


def test_weights_on_gpus_do_not_travel_through_host_memory(demo: Demo) -> None:
    found = problems(demo("policy.device=cuda", "generation.weight_transport=shared_memory"))
    assert any("generation.weight_transport=shared_memory maps host memory" in problem for problem in found)
