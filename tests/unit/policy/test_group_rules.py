from __future__ import annotations

from collections.abc import Callable

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.rules.rules import validate
from tests.unit.config.checkpoints import PADDED

Demo = Callable[..., Config]

PACKING = "policy.sequence_packing"
DYNAMIC = "policy.dynamic_batching"
MUON = "policy.optimizer.kind=muon"
SHARDED = "policy.megatron_cfg.use_distributed_optimizer=true"


def problems(cfg: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    return [str(problem) for problem in caught.value.problems]


def test_packing_and_dynamic_batches_exclude_each_other(demo: Demo) -> None:
    (problem,) = problems(demo(f"{PACKING}.enabled=true", f"{DYNAMIC}.enabled=true"))
    assert problem.startswith(f"{DYNAMIC}.enabled=true excludes {PACKING}.enabled=true")


@pytest.mark.parametrize("section", [PACKING, DYNAMIC])
def test_a_token_budget_must_hold_the_longest_sample(demo: Demo, section: str) -> None:
    budgets = (f"{section}.train_mb_tokens=31", f"{section}.logprob_mb_tokens=100")
    cfg = demo(*PADDED, f"{section}.enabled=true", f"{DYNAMIC}.sequence_length_round=1", *budgets)
    (problem,) = problems(cfg)
    assert problem == (
        f"{section}.train_mb_tokens=31 must hold a sample of policy.max_total_sequence_length=32 tokens; "
        "try 32 or more"
    )
    validate(demo(*PADDED, *budgets))  # not enabled


def test_a_token_budget_must_hold_the_longest_sample_after_rounding(demo: Demo) -> None:
    budget = (f"{DYNAMIC}.sequence_length_round=20", f"{DYNAMIC}.train_mb_tokens=39")
    cfg = demo(*PADDED, f"{DYNAMIC}.enabled=true", *budget)
    (problem,) = problems(cfg)
    assert "32 tokens, rounded up to a multiple of 20; try 40 or more" in problem


def test_lengths_must_divide_into_what_sequence_and_context_parallelism_make_of_them(demo: Demo) -> None:
    axes = "policy.megatron_cfg"
    cfg = demo(
        *PADDED,
        f"{axes}.tensor_model_parallel_size=2",
        f"{axes}.sequence_parallel=true",
        f"{axes}.context_parallel_size=2",
        "policy.max_total_sequence_length=60",
    )
    (problem,) = problems(cfg)
    assert problem == (
        "policy.max_total_sequence_length=60 must be a multiple of 8, into which sequence and context "
        "parallelism cut it; try 56 or 64"
    )


def test_megatrons_optimizer_can_leave_the_device_only_where_it_has_weights_of_its_own(demo: Demo) -> None:
    offload = "policy.offload_optimizer_for_logprob=true"
    on_gpu = (offload, "policy.device=cuda")
    (problem,) = [text for text in problems(demo(*on_gpu)) if text.startswith(offload)]
    assert "needs policy.precision=bfloat16 or float16 with policy.backend=megatron" in problem
    adapted = demo(*on_gpu, "policy.precision=bfloat16", "policy.lora.enabled=true")
    (problem,) = [text for text in problems(adapted) if text.startswith(offload)]
    assert "is not for policy.lora.enabled=true with policy.backend=megatron" in problem
    halved = demo(*on_gpu, "policy.precision=float16")
    assert not [text for text in problems(halved) if text.startswith(offload)]
    fsdp = demo(*on_gpu, "policy.backend=fsdp", "policy.megatron_cfg.use_distributed_optimizer=false")
    assert not [text for text in problems(fsdp) if text.startswith(offload)]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([], "pipeline_model_parallel_size=1: there is no pipeline"),
        (["num_layers_in_first_pipeline_stage=3"], "num_layers_in_first_pipeline_stage: chunks are equal"),
        (["num_layers_in_last_pipeline_stage=3"], "num_layers_in_last_pipeline_stage: chunks are equal"),
        (["router_replay=true"], "router_replay=true, which counts the layers of a stage from its first one"),
    ],
)
def test_a_pipeline_is_interleaved_where_stages_are_alike(
    demo: Demo, settings: list[str], reason: str
) -> None:
    megatron, stages = "policy.megatron_cfg", ["pipeline_model_parallel_size=2"] if settings else []
    key = f"{megatron}.virtual_pipeline_model_parallel_size=2"
    found = problems(demo(key, *(f"{megatron}.{setting}" for setting in (*stages, *settings))))
    of_chunks = [text for text in found if text.startswith(f"{key} is not for")]
    assert of_chunks == [f"{key} is not for {megatron}.{reason}; set it to null"]


def test_megatrons_optimizer_is_on_the_host_of_a_gpu_where_it_is_sharded_and_in_bfloat16(demo: Demo) -> None:
    offload = "policy.megatron_cfg.optimizer_cpu_offload=true"
    on_gpu = ("policy.device=cuda", "policy.precision=bfloat16", SHARDED)

    def found(*settings: str) -> list[str]:
        texts = [text for text in problems(demo(offload, *settings)) if text.startswith(offload)]
        return [text.removeprefix(f"{offload} needs ").split(":")[0] for text in texts]

    assert found(*on_gpu) == found(*on_gpu, "policy.offload_optimizer_for_logprob=true") == []
    assert found(*on_gpu, "policy.device=cpu") == [
        "policy.device=cuda, where there is a host to move to; set it to false"
    ]
    assert found("policy.device=cuda") == [
        "policy.precision=bfloat16",
        "policy.megatron_cfg.use_distributed_optimizer=true",
    ]
    assert found(*on_gpu, "policy.lora.enabled=true") == ["policy.lora.enabled=false"]
    assert found(*on_gpu, MUON) == [
        "policy.optimizer.kind=adamw, which is Megatron-core's optimizer there; set it to false"
    ]


def test_muon_trains_whole_matrices_of_layers(demo: Demo) -> None:
    (adapters,) = problems(demo(MUON, "policy.lora.enabled=true"))
    assert adapters.startswith(f"{MUON} is not for policy.lora.enabled=true")
    (sharded,) = problems(demo(MUON, SHARDED))
    assert sharded.startswith(f"{SHARDED} is not for {MUON}, which needs whole matrices")
    assert sharded.endswith("set it to false; policy.backend=fsdp shards Muon's state")
    validate(demo(MUON))
    validate(demo(MUON, "policy.backend=fsdp"))


FP8 = "policy.megatron_cfg.fp8=hybrid"


def of_fp8(demo: Demo, *overrides: str) -> list[str]:
    return [text for text in problems(demo(FP8, *overrides)) if text.startswith(FP8)]


def test_linear_layers_compute_in_8_bits_only_with_transformer_engine_on_a_gpu(
    demo: Demo, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = ("policy.device=cuda", "policy.precision=bfloat16")
    for others in ((), on_gpu[:1], on_gpu[1:]):
        (problem,) = of_fp8(demo, *others)
        assert "needs policy.device=cuda and policy.precision=bfloat16" in problem
    monkeypatch.setattr("nemo_like.policy.backend_kinds.megatron.find_spec", lambda name: None)
    (problem,) = of_fp8(demo, *on_gpu)
    assert problem.startswith(
        f"{FP8} needs Transformer Engine, which is not installed; scripts/setup.sh --gpu"
    )
    monkeypatch.setattr("nemo_like.policy.backend_kinds.megatron.find_spec", lambda name: object())
    assert of_fp8(demo, *on_gpu) == []


def test_lengths_are_multiples_of_what_products_in_8_bits_take(demo: Demo) -> None:
    found = problems(demo(FP8, "policy.max_total_sequence_length=96"))
    assert (
        "policy.max_total_sequence_length=96 must be a multiple of 128, which products in 8 bits, and what "
        "cuts sequences over ranks, need; try 128"
    ) in found


def test_the_other_backend_does_not_compute_in_8_bits(demo: Demo) -> None:
    found = problems(demo(FP8, "policy.backend=fsdp", "policy.megatron_cfg.use_distributed_optimizer=false"))
    assert any("fp8=" in text and "is for policy.backend=megatron" in text for text in found)


def test_the_scale_of_a_loss_begins_above_its_least(demo: Demo) -> None:
    (problem,) = problems(demo("policy.loss_scaling.initial_loss_scale=0.5"))
    assert problem == (
        "policy.loss_scaling.initial_loss_scale=0.5 must be at least policy.loss_scaling.min_loss_scale=1; "
        "65536 is usual"
    )


@pytest.mark.parametrize("name", ["offload_optimizer_for_logprob", "offload_parameters_between_phases"])
def test_only_a_gpu_has_a_host_to_move_to(demo: Demo, name: str) -> None:
    (problem,) = problems(demo(f"policy.{name}=true", "policy.precision=bfloat16"))
    assert problem == (
        f"policy.{name}=true needs policy.device=cuda, where there is a host to move to; set it to false"
    )


SHARING = (f"{PACKING}.enabled=true", f"{PACKING}.share_prompts=true", "grpo.samples_kept_together=4")


def test_prompts_are_shared_in_packed_rows_only(demo: Demo) -> None:
    validate(demo(*SHARING))
    (problem,) = problems(demo(*SHARING, f"{PACKING}.enabled=false"))
    assert problem == (
        f"{PACKING}.share_prompts=true needs {PACKING}.enabled=true: prompts are shared in rows of several "
        "samples; set that to true, or this to false"
    )


def test_prompts_are_shared_in_every_layout_and_precision(demo: Demo) -> None:
    validate(demo(*SHARING, "policy.megatron_cfg.context_parallel_size=2", "policy.data_parallel_size=1"))
    on_gpus = problems(demo(*SHARING, "policy.device=cuda", "policy.precision=float32"))
    assert not [text for text in on_gpus if text.startswith(PACKING)]


def test_updates_of_one_sample_per_prompt_share_nothing(demo: Demo) -> None:
    apart = "grpo.samples_kept_together=1"
    (problem,) = problems(demo(*SHARING, apart))
    assert problem == (
        f"{PACKING}.share_prompts=true shares nothing: with grpo.mix_groups_in_updates=true an update of "
        "policy.train_global_batch_size=128 samples has one of each prompt; set grpo.samples_kept_together=4 "
        "or another number above 1, or this to false"
    )
    validate(demo(*SHARING, apart, "policy.train_global_batch_size=256"))
    validate(demo(*SHARING, apart, "grpo.mix_groups_in_updates=false"))
