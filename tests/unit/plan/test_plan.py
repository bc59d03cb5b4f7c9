from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nemo_like.batch.columns import ROLLOUT_COLUMNS, VALUE_COLUMNS, bytes_per_token
from nemo_like.configuration import Config
from nemo_like.models.model_info import read_model_info
from nemo_like.plan.plan import Plan, checkpoint_bytes, format_plan, make_plan
from nemo_like.plan.roles import Role, ray_cpus, roles
from nemo_like.plan.run_models import run_models
from nemo_like.policy.batch.policy_columns import scored_columns
from tests.unit.config.checkpoints import PADDED, SCORED, write_checkpoint

Demo = Callable[..., Config]


CRITIC = ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false")


def plan(cfg: Config) -> Plan:
    columns = (*ROLLOUT_COLUMNS, *scored_columns(cfg.loss_fn), *(VALUE_COLUMNS if cfg.value else ()))
    return make_plan(cfg, run_models(cfg), bytes_per_token(columns))


def test_the_demo_asks_ray_for_one_cpu_per_worker_engine_and_transfer_queue_process(demo: Demo) -> None:
    needs = roles(demo())
    assert {role: (n.count, n.num_cpus, n.num_gpus) for role, n in needs.items()} == {
        Role.driver: (1, 0, 0),
        Role.data_plane_host: (1, 0, 0),
        Role.controller: (1, 1, 0),
        Role.storage_unit: (1, 1, 0),
        Role.rollout: (1, 0, 0),
        Role.environment: (1, 0.1, 0),
        Role.engine: (2, 1, 0),
        Role.policy_worker: (2, 1, 0),
    }
    assert ray_cpus(demo()) == 7  # 1 + 1 + 0.1 + 2 + 2, rounded up


def test_ten_environment_actors_make_one_cpu_exactly(demo: Demo) -> None:
    assert ray_cpus(demo("env.arithmetic.num_actors=10")) == 7
    assert ray_cpus(demo("env.arithmetic.num_actors=11")) == 8


def test_workers_are_tp_times_pp_times_dp_and_engines_take_one_cpu_per_rank(demo: Demo) -> None:
    cfg = demo(
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "policy.megatron_cfg.pipeline_model_parallel_size=2",
        "policy.data_parallel_size=4",
        "generation.num_engines=3",
        "generation.vllm_cfg.tensor_parallel_size=2",
        "data_plane.num_storage_units=2",
    )
    assert roles(cfg)[Role.policy_worker].count == 16
    assert ray_cpus(cfg) == 1 + 2 + 1 + 6 + 16
    assert all(needs.num_gpus == 0 for needs in roles(cfg).values())


def test_context_parallel_ranks_are_workers_and_expert_parallel_ones_are_not(demo: Demo) -> None:
    axes = "policy.megatron_cfg"
    cfg = demo(f"{axes}.context_parallel_size=2", f"{axes}.expert_model_parallel_size=4")
    assert roles(cfg)[Role.policy_worker].count == 4
    assert "policy TP1 x CP2 x PP1 x DP2, experts over 4" in format_plan(plan(cfg))


def test_on_gpus_workers_and_engine_ranks_take_one_each(demo: Demo) -> None:
    tp = "generation.vllm_cfg.tensor_parallel_size=2"
    needs = roles(demo("policy.device=cuda", "generation.num_engines=3", tp))
    assert needs[Role.engine].num_gpus == 2
    assert needs[Role.policy_worker].num_gpus == 1


def test_the_plan_of_the_demo_adds_up(demo: Demo) -> None:
    result = plan(demo(*PADDED))
    assert result.step_shape.num_samples == 128 * 8 == 1024
    assert result.policy.updates_per_step == 1024 // 128 == 8
    assert result.policy.micro_batches_per_update == 128 // 2 // 64 == 1
    assert result.policy.forwards_per_phase == 1024 // 2 // 128 == 4
    assert result.max_tokens_per_step == 1024 * 32
    # input_ids int32, response_mask uint8, generation_logprobs float32
    assert result.bytes_per_token == 4 + 1 + 4
    assert result.data_plane_bytes_per_step == 9 * 32_768
    assert result.weight_bytes == 4 * 402_176


def test_each_pass_that_scores_adds_its_column_and_its_forwards(demo: Demo) -> None:
    forwards = "at most 4 forwards (128 samples) per step on each data-parallel rank"
    scored = plan(demo(*PADDED, SCORED))
    assert scored.bytes_per_token == 9 + 4
    assert f"log-probs    {forwards}" in format_plan(scored)
    both = plan(demo(*PADDED, SCORED, "loss_fn.reference_policy_kl_penalty=0.01"))
    assert both.bytes_per_token == 9 + 4 + 4
    assert f"log-probs    twice {forwards}" in format_plan(both)


def test_a_last_micro_batch_that_is_not_full_counts(demo: Demo) -> None:
    result = plan(demo(*PADDED, "policy.train_micro_batch_size=48", "policy.logprob_batch_size=500"))
    assert result.policy.micro_batches_per_update == 2  # 48 + 16 rows
    assert result.policy.forwards_per_phase == 2  # 500 + 12 rows


def test_with_a_token_budget_the_plan_counts_micro_batches_of_the_longest_samples(demo: Demo) -> None:
    shared = plan(demo("policy.sequence_packing.train_mb_tokens=100"))
    assert shared.policy.micro_batches_per_update == 22  # 64 rows of 32 tokens, 3 in a micro-batch
    assert shared.policy.forwards_per_phase == 16  # 512 rows, 32 in a micro-batch of 1024 tokens
    assert "at most 22 micro-batches (up to 100 tokens, packed, prompts shared) per" in format_plan(shared)
    packed = plan(demo("policy.sequence_packing.share_prompts=false"))
    assert "at most 2 micro-batches (up to 1,024 tokens, packed) per update" in format_plan(packed)
    rounded = (
        "policy.dynamic_batching.sequence_length_round=64",
        "policy.dynamic_batching.train_mb_tokens=128",
    )
    dynamic = plan(demo(*PADDED, "policy.dynamic_batching.enabled=true", *rounded))
    assert dynamic.policy.micro_batches_per_update == 32
    assert "(up to 128 tokens, dynamic)" in format_plan(dynamic)


def test_bfloat16_halves_the_weights(demo: Demo) -> None:
    assert plan(demo("policy.precision=bfloat16")).weight_bytes == 2 * 402_176


def test_the_printed_plan_names_every_role_and_number(demo: Demo) -> None:
    planned = plan(demo("policy.megatron_cfg.tensor_model_parallel_size=2"))
    text = format_plan(planned)
    assert planned.roles.keys() == {*Role} - {
        Role.reward_model,
        Role.value_worker,
        Role.teacher_worker,
        Role.endpoint,
        Role.engine_part,
    }
    for role in planned.roles:
        assert role.value in text
    assert "402,176 parameters, policy TP2 x PP1 x DP2" in text
    assert "128 prompts x 8 responses = 1,024 rows; 80 steps" in text
    assert "at most 294.9 kB per step (32,768 tokens x 9 bytes)" in text
    assert "log-probs    none are computed before training" in text


def test_large_sizes_are_printed_in_their_unit(demo: Demo, checkpoint: Path) -> None:
    small = plan(demo())
    assert "weight sync  16 GB per step" in format_plan(replace(small, weight_bytes=16_000_000_000))


def test_the_nodes_of_an_engine_over_several_are_named(demo: Demo) -> None:
    spread = demo(
        *("policy.device=cuda", "cluster.gpus_per_node=8", "cluster.num_nodes=3", "generation.num_engines=1"),
        *("generation.vllm_cfg.tensor_parallel_size=16", "generation.vllm_cfg.num_nodes=2"),
    )
    text = format_plan(plan(spread))
    assert "  part of a vLLM engine          1          8          8\n" in text
    first, second = (f"node {node} GPUs 0, 1, 2, 3, 4, 5, 6, 7\n" for node in (1, 2))
    assert f"engines\n  {'engine':<26}{first}  {'engine_part':<26}{second}" in text + "\n"
    assert "engines\n" not in format_plan(plan(demo()))


def test_fsdp_workers_are_tp_times_dp(demo: Demo) -> None:
    cfg = demo("policy.backend=fsdp", "policy.fsdp_cfg.tensor_parallel_size=2", "policy.data_parallel_size=4")
    assert roles(cfg)[Role.policy_worker].count == 8
    assert "policy FSDP TP2 x DP4\n" in format_plan(plan(cfg))
    adapted = demo("policy.backend=fsdp", "policy.lora.enabled=true")
    assert "policy FSDP TP1 x DP2, LoRA of rank 16\n" in format_plan(plan(adapted))


def test_the_plan_says_where_muons_momentum_is(demo: Demo) -> None:
    each, muon = "per update on each data-parallel rank", "policy.optimizer.kind=muon"
    whole = f"{each}; Muon, whose momentum is whole on each of them\n"
    assert whole in format_plan(plan(demo(muon)))
    spread = f"{each}; Muon, whose momentum is spread over them\n"
    assert spread in format_plan(plan(demo(muon, "policy.backend=fsdp")))
    assert f"{each}\n" in format_plan(plan(demo()))


def test_the_plan_names_the_adapters_of_megatron_too(demo: Demo) -> None:
    adapted = demo("policy.lora.enabled=true", "policy.lora.rank=4")
    assert "policy TP1 x PP1 x DP2, LoRA of rank 4\n" in format_plan(plan(adapted))


def test_a_checkpoint_of_adapters_has_nothing_of_the_frozen_weights(demo: Demo) -> None:
    lora = ("policy.lora.enabled=true", "policy.lora.rank=4")
    targets = ("policy.lora.target_modules=[q_proj,down_proj]",)
    # 2 layers, rank 4: q_proj is 128 to 4 x 32, down_proj 384 to 128; three values in float32 of each.
    expected = 2 * 4 * (128 + 128 + 384 + 128) * 12
    for backend in ("policy.backend=fsdp", "policy.precision=bfloat16"):
        cfg = demo(*lora, *targets, backend)
        model = read_model_info(cfg.policy.model_name, cfg.policy.backend)
        assert checkpoint_bytes(cfg.policy, model) == expected


def test_a_critic_adds_its_workers_columns_phases_and_updates(demo: Demo) -> None:
    axis = "value.megatron_cfg.tensor_model_parallel_size=2"
    cfg = demo(*CRITIC, axis, "value.num_epochs_per_rollout=2", "value.warmup_steps=10")
    needs = roles(cfg)
    assert (needs[Role.policy_worker].count, needs[Role.value_worker].count) == (2, 4)
    assert list(needs)[-2:] == [Role.policy_worker, Role.value_worker]
    assert ray_cpus(cfg) == 7 + 4
    result = plan(cfg)
    assert result.bytes_per_token == 9 + 3 * 4
    text = format_plan(result)
    assert "  value worker                   4          1          0\n" in text
    assert (
        "critic       402,304 parameters, TP2 x PP1 x DP2; it trains alone in the first 10 steps\n"
        "  values     at most 16 forwards (up to 1,024 tokens, packed) per step on each data-parallel rank\n"
        "  training   16 updates per step, at most 2 micro-batches (up to 1,024 tokens, packed, prompts "
        "shared) per update on each data-parallel rank\n"
    ) in text
    assert "critic" not in format_plan(plan(demo()))


def test_a_critic_of_its_own_size_has_its_own_numbers(demo: Demo, tmp_path: Path) -> None:
    large = write_checkpoint(tmp_path / "large", num_hidden_layers=4)
    result = plan(demo(*CRITIC, f"value.model_name={large}", "value.train_global_batch_size=256"))
    assert result.critic is not None
    assert result.policy.num_parameters == 402_176
    assert result.critic.num_parameters == 402_176 + 2 * 196_928 + 128  # 2 more layers, and a head
    assert (result.policy.updates_per_step, result.critic.updates_per_step) == (8, 4)


TEACHER = ("teacher=default", "loss_fn.kind=distillation")


def test_a_teacher_adds_its_workers_or_its_engine(demo: Demo, tmp_path: Path) -> None:
    model = f"teacher.model_name={write_checkpoint(tmp_path / 'large', num_hidden_layers=4)}"
    by_workers = demo(*TEACHER, model, "teacher.megatron_cfg.tensor_model_parallel_size=2")
    assert roles(by_workers)[Role.teacher_worker].count == 4
    assert (
        "teacher      796,032 parameters, TP2 x PP1 x DP2\n"
        "  log-probs  at most 16 forwards (up to 1,024 tokens, packed, prompts shared) per step on each "
        "data-parallel rank\n"
    ) in format_plan(plan(by_workers))
    by_engine = demo(*TEACHER, model, "teacher.scored_by=engine", "teacher.data_parallel_size=1")
    assert "teacher      796,032 parameters, scored by one vLLM engine\n" in format_plan(plan(by_engine))


def test_the_plan_says_which_tokens_end_a_response(demo: Demo, checkpoint: Path) -> None:
    eos = json.dumps({"eos_token": {"content": "<end>"}})
    (checkpoint / "tokenizer_config.json").write_text(eos)
    added = [
        {"id": 9, "content": "<end>"},
        {"id": 8, "content": "<end of turn>"},
        {"id": 1, "content": "<pad>"},
    ]
    (checkpoint / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 9, 60]}))
    text = format_plan(plan(demo()))
    assert "responses    end at <end> (9), <end of turn> (8), 60\n" in text
    (checkpoint / "tokenizer.json").write_text("{}")
    text = format_plan(plan(demo()))
    assert "responses    end at the eos of the tokenizer, 8, 9, 60\n" in text


def test_the_plan_says_what_a_run_takes_of_another_ones_checkpoint(demo: Demo) -> None:
    there = "checkpointing.resume_from_path=/runs/a/checkpoints/step_4"
    whole = format_plan(plan(demo(there)))
    assert "start        takes of /runs/a/checkpoints/step_4 everything, and goes on with its step" in whole
    part = format_plan(plan(demo(there, "checkpointing.resume_parts=weights_and_optimizer")))
    assert "step_4 the weights and Adam's moments alone, and begins at step 0 with its own schedule" in part
    assert "start  " not in format_plan(plan(demo()))


def test_the_plan_says_which_code_of_others_runs(demo: Demo) -> None:
    trusted = format_plan(plan(demo("policy.trust_remote_code=true")))
    assert "code         Python files of the checkpoints run with all your rights, so read them" in trusted
    both = format_plan(plan(demo("policy.trust_remote_code=true", "policy.external_lib=[own, other]")))
    assert "code         imported first: own, other; Python files of the checkpoints run" in both
    assert "code  " not in format_plan(plan(demo()))
