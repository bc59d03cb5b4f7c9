from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.models.family import described_types
from nemo_like.models.model_info import read_model_info
from nemo_like.models.quantization import DEQUANTISE
from nemo_like.plan.machine_rules import Machine
from nemo_like.rules.checkpoint_rules import checkpoint_problems
from tests.unit.config.checkpoints import write_checkpoint

Demo = Callable[..., Config]


def problems(cfg: Config) -> list[str]:
    return [str(problem) for problem in checkpoint_problems(cfg)]


def test_cuda_graphs_are_refused_on_cpus(demo: Demo) -> None:
    (problem,) = problems(demo("generation.vllm_cfg.enforce_eager=false"))
    assert problem == (
        "generation.vllm_cfg.enforce_eager=false asks for CUDA graphs, which engines have with "
        "policy.device=cuda alone; set it to true"
    )


def test_a_missing_arithmetic_checkpoint_says_the_command_that_makes_it(demo: Demo) -> None:
    (problem,) = problems(demo("policy.model_name=/nowhere/arithmetic-d2-s7", "grpo.seed=7"))
    assert problem == (
        "policy.model_name=/nowhere/arithmetic-d2-s7 is not a directory; make it with: .venv/bin/python "
        "scripts/prepare_arithmetic.py --output /nowhere/arithmetic-d2-s7 --digits 2 --seed 7 "
        "(scripts/demo.sh does)"
    )


def test_a_missing_arithmetic_mixture_is_made_by_the_same_script(demo: Demo) -> None:
    (problem,) = problems(demo("policy.model_name=/nowhere/arithmetic-moe-d2-s7"))
    assert problem.endswith("--digits 2 --seed 7 --experts 8 (scripts/demo.sh --experts does)")


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("/m/Qwen3-8B", "download it: hf download Qwen/Qwen3-8B --local-dir /m/Qwen3-8B"),
        (
            "models/Llama-3.1-8B-Instruct",
            "hf download meta-llama/Llama-3.1-8B-Instruct --local-dir models/Llama-3.1-8B-Instruct",
        ),
        (
            "Qwen/Qwen3-8B",
            "hf download Qwen/Qwen3-8B --local-dir models/Qwen3-8B, and name that directory",
        ),
        ("/nowhere/sums-s4", "bash scripts/demo.sh --agent makes it, and its problems"),
        ("/my models/Qwen3-8B", "hf download Qwen/Qwen3-8B --local-dir '/my models/Qwen3-8B'"),
        ("models/mine", "download a model, for example: hf download OWNER/mine --local-dir models/mine"),
    ],
)
def test_another_missing_checkpoint_says_how_to_download_that_one(demo: Demo, name: str, remedy: str) -> None:
    (problem,) = problems(demo(f"policy.model_name={name}"))
    assert problem.startswith(f"policy.model_name={name} is not a directory; ")
    assert problem.endswith(remedy)


def test_a_known_model_need_not_be_there_for_a_plan_of_another_machines_run(demo: Demo) -> None:
    cfg = demo("policy.model_name=models/Qwen3-8B", "policy.megatron_cfg.tensor_model_parallel_size=16")
    (problem,) = map(str, checkpoint_problems(cfg, Machine.another))
    assert problem.endswith("must divide the model's 8 key-value heads; try 8")
    assert "is not a directory" in problems(cfg)[0]


def test_a_head_size_without_attention_on_the_cpu_is_refused_where_engines_are_on_one(
    demo: Demo, checkpoint: Path
) -> None:
    write_checkpoint(checkpoint, head_dim=48)
    (problem,) = problems(demo())
    assert "has attention heads of size 48, and vLLM has attention on the CPU only for 32, 64, 80" in problem
    assert not problems(demo("policy.device=cuda"))
    assert not problems(demo("rollout.replay=recorded"))


MLA = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}


def test_latents_without_attention_on_the_cpu_are_refused_where_engines_are_on_one(
    demo: Demo, checkpoint: Path
) -> None:
    write_checkpoint(checkpoint, **MLA, kv_lora_rank=256)
    (problem,) = problems(demo())
    assert "has latents of size 320, and vLLM has attention on the CPU only for 576" in problem
    write_checkpoint(checkpoint, **MLA)
    assert not problems(demo())


def test_what_replaces_entries_that_engines_of_a_family_need_is_refused_on_cpus(
    demo: Demo, checkpoint: Path
) -> None:
    write_checkpoint(checkpoint, **MLA)
    (problem,) = problems(demo("generation.vllm_kwargs.compilation_config=3"))
    assert problem == (
        "generation.vllm_kwargs.compilation_config=3 must be a mapping, which is merged with "
        "{'custom_ops': ['-rotary_embedding']}: vLLM's engines on CPUs need that for a model of type "
        "'deepseek_v3'; write entries instead of one value, or leave it out"
    )
    assert not problems(demo("generation.vllm_kwargs.compilation_config={cudagraph_mode: NONE}"))
    assert not problems(demo("generation.vllm_kwargs.compilation_config=3", "policy.device=cuda"))


def test_weights_in_8_bits_are_refused_where_engines_would_take_them(demo: Demo, checkpoint: Path) -> None:
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_checkpoint(checkpoint, **MLA, quantization_config=settings)
    (problem,) = problems(demo())
    assert problem.endswith(
        "has weights in fewer than 16 bits (fp8), for which engines would take the trainer's in float32; "
        "scripts/dequantise_checkpoint.py writes a checkpoint with weights in 16 bits; name that"
    )
    assert not problems(demo("rollout.replay=recorded"))


def test_products_in_8_bits_are_for_layers_of_transformer_engine(demo: Demo, checkpoint: Path) -> None:
    keys = ("policy.megatron_cfg.fp8=hybrid", "policy.device=cuda", "policy.precision=bfloat16")
    assert not any("Transformer Engine" in one for one in problems(demo(*keys)))
    write_checkpoint(checkpoint, **MLA)
    (problem,) = problems(demo(*keys))
    assert problem == (
        "policy.megatron_cfg.fp8=hybrid is for Transformer Engine's layers, and those of a model of type "
        "'deepseek_v3' have other parts; set it to null"
    )


def test_adapters_of_latent_attention_are_beside_its_output_and_experts_alone(
    demo: Demo, checkpoint: Path
) -> None:
    write_checkpoint(checkpoint, **MLA)
    named = "policy.lora.target_modules=[q_proj,o_proj]"
    (problem,) = problems(demo("policy.lora.enabled=true", named))
    assert (
        "asks for adapters beside q_proj, and a model of type 'deepseek_v3' has q_a_proj, q_b_proj" in problem
    )
    assert problem.endswith("set it to [o_proj, gate_proj, up_proj, down_proj], or set policy.backend=fsdp")
    assert not problems(demo("policy.lora.enabled=true", "policy.lora.target_modules=[o_proj]"))


@pytest.mark.parametrize(
    ("file", "rule"),
    [
        ("config.json", "has no config.json; point it at a Hugging Face checkpoint directory"),
        ("model.safetensors", "has no weights (*.safetensors)"),
        ("tokenizer.json", "has no tokenizer"),
        ("tokenizer_config.json", "has no tokenizer"),
    ],
)
def test_a_file_that_is_missing_is_named(demo: Demo, checkpoint: Path, file: str, rule: str) -> None:
    (checkpoint / file).unlink()
    (problem,) = problems(demo())
    assert problem.startswith(f"policy.model_name={checkpoint} {rule}")


@pytest.mark.parametrize(
    ("model_type", "nearest"), [("gpt2", ""), ("llama4_text", ", of which llama is nearest")]
)
def test_a_model_of_an_unsupported_type_names_the_supported_ones_and_that_which_is_nearest(
    demo: Demo, checkpoint: Path, model_type: str, nearest: str
) -> None:
    write_checkpoint(checkpoint, model_type=model_type)
    (problem,) = problems(demo())
    assert problem.endswith(
        f"is a model of type {model_type!r}; supported are {', '.join(described_types())}{nearest}; "
        "policy.backend=fsdp trains others too"
    )


def test_an_unsupported_feature_is_named(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, use_sliding_window=True)
    (problem,) = problems(demo())
    assert "has use_sliding_window=true, which is not supported" in problem


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_config_that_is_no_json_object_is_refused(demo: Demo, checkpoint: Path, text: str) -> None:
    (checkpoint / "config.json").write_text(text)
    (problem,) = problems(demo())
    assert "has a config.json that is not" in problem


def test_a_config_without_a_size_names_it(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, hidden_size=None, vocab_size=0)
    (problem,) = problems(demo())
    assert problem.endswith("has a config.json without a positive integer for hidden_size, vocab_size")


def test_tensor_parallel_must_divide_heads_and_columns(demo: Demo) -> None:
    (problem,) = problems(demo("policy.megatron_cfg.tensor_model_parallel_size=3"))
    assert problem == (
        "policy.megatron_cfg.tensor_model_parallel_size=3 must divide the model's 4 attention heads "
        "and its 2 key-value heads; try 2"
    )
    assert not problems(demo("policy.megatron_cfg.tensor_model_parallel_size=2"))


def test_tensor_parallel_must_divide_the_ffn(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, intermediate_size=385)
    (problem,) = problems(demo("policy.megatron_cfg.tensor_model_parallel_size=2"))
    assert "must divide the model's 385 FFN columns; try 1" in problem


def test_pipeline_parallel_must_divide_the_layers(demo: Demo) -> None:
    (problem,) = problems(demo("policy.megatron_cfg.pipeline_model_parallel_size=3"))
    assert (
        problem
        == "policy.megatron_cfg.pipeline_model_parallel_size=3 must divide the model's 2 layers; try 2"
    )


PIPELINE = "policy.megatron_cfg.pipeline_model_parallel_size"
CHUNKS = "policy.megatron_cfg.virtual_pipeline_model_parallel_size"


def test_an_interleaved_pipeline_has_stages_of_equal_chunks(demo: Demo) -> None:
    assert not problems(demo(f"{CHUNKS}=1"))
    (problem,) = problems(demo(f"{PIPELINE}=2", f"{CHUNKS}=2"))
    assert problem.startswith(f"{CHUNKS}=2 must divide the model's 1 layers of a stage; try 1")


FIRST, LAST = (f"policy.megatron_cfg.num_layers_in_{end}_pipeline_stage" for end in ("first", "last"))


def test_stages_have_the_layers_that_their_keys_give_them(demo: Demo) -> None:
    assert problems(demo(f"{PIPELINE}=2", f"{FIRST}=1")) == []
    (problem,) = problems(demo(f"{PIPELINE}=2", f"{FIRST}=2"))
    assert problem == (
        f"{FIRST}=2 does not fit the model's 2 layers and {PIPELINE}=2: 0 layers cannot be divided over "
        "1 stages; every other stage has equally many layers"
    )
    (problem,) = problems(demo(f"{PIPELINE}=2", f"{FIRST}=1", f"{LAST}=2"))
    assert problem.startswith(f"{FIRST}=1, {LAST}=2 does not fit the model's 2 layers")
    (problem,) = problems(demo(f"{LAST}=1"))
    assert problem == f"{LAST}=1 needs {PIPELINE} above 1; set it to null"


def test_routers_are_frozen_in_a_mixture_whose_weights_train(demo: Demo, checkpoint: Path) -> None:
    key = "policy.megatron_cfg.freeze_moe_router=true"
    (problem,) = problems(demo(key))
    assert problem.startswith(f"{key} needs a mixture of experts, and this model is of type")


EXPERTS = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 33,
}


def test_experts_must_divide_over_the_ranks_of_a_stage(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, **EXPERTS)
    key = "policy.megatron_cfg.expert_model_parallel_size"
    assert not problems(demo(f"{key}=2"))
    assert problems(demo(f"{key}=4")) == [
        f"{key}=4 must divide the model's 6 experts; try 3 or 6",
        f"{key}=4 must divide the TP x CP x DP = 2 ranks of a pipeline stage; try 2",
    ]


def test_tensor_parallel_ranks_share_experts_all_of_them_or_none(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, **{**EXPERTS, "moe_intermediate_size": 32})
    key, group = "expert_tensor_parallel_size", "policy.megatron_cfg"
    layout = [f"{group}.tensor_model_parallel_size=2", f"{group}.sequence_parallel=true"]
    assert not problems(demo(*layout, f"{group}.{key}=2"))
    (problem,) = problems(demo(f"{group}.{key}=2", "policy.data_parallel_size=2"))
    assert problem.startswith(f"{group}.{key}=2 must be 1, or {group}.tensor_model_parallel_size=1")
    (problem,) = problems(demo(*layout, f"{group}.{key}=2", f"{group}.moe_grouped_gemm=true"))
    assert "needs Transformer Engine" in problem
    found = problems(demo(*layout, f"{group}.{key}=2", f"{group}.expert_model_parallel_size=3"))
    uneven, problem = sorted(found, key=lambda one: "needs GPUs" in one)
    assert "must divide the TP x CP x DP" in uneven
    assert problem.startswith(f"{group}.{key}=2 needs GPUs with {group}.expert_model_parallel_size=3: ")


def test_each_expert_has_one_adapter_for_gate_and_up_and_none_with_dropout(
    demo: Demo, checkpoint: Path
) -> None:
    targets, dropout = "policy.lora.target_modules", "policy.lora.dropout=0.1"
    lora = "policy.lora.enabled=true"
    (problem,) = problems(demo(lora, f"{targets}=[q_proj,w2]"))
    assert problem == (
        f"{targets}=[q_proj, w2] asks for adapters beside w2, which experts of a mixture have, and this "
        "model is of type 'qwen3'; name some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
    )
    write_checkpoint(checkpoint, **EXPERTS)
    for backend in ("policy.backend=megatron", "policy.backend=fsdp"):
        assert not problems(demo(lora, backend, dropout))  # all linear layers, which experts are not
        assert not problems(demo(lora, backend, f"{targets}=[q_proj,o_proj]", dropout))
        assert not problems(demo(lora, backend, f"{targets}=[q_proj,gate_proj,up_proj,down_proj]"))
        assert problems(demo(lora, backend, f"{targets}=[q_proj,gate_proj]")) == [
            f"{targets}=[q_proj, gate_proj] has gate_proj without up_proj, and in a mixture each expert has "
            "one adapter for both; name both or neither"
        ]
        assert problems(demo(lora, backend, f"{targets}=[w1,w3,w2]", dropout)) == [
            f"{dropout} must be 0 with adapters beside experts, which {targets}=[w1, w3, w2] asks for: peft "
            "has none with dropout; set it to 0"
        ]


def test_fused_layers_of_a_checkpoint_get_no_adapters_but_the_others_do(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, model_type="phi3")
    assert not problems(demo("policy.lora.enabled=true", "policy.lora.target_modules=[o_proj,down_proj]"))
    (problem,) = problems(demo("policy.lora.enabled=true", "policy.lora.target_modules=[o_proj,up_proj]"))
    assert problem == (
        "policy.lora.target_modules=[o_proj, up_proj] asks for adapters beside up_proj, and a model of type "
        "'phi3' has qkv_proj, o_proj, gate_up_proj, down_proj; set it to [o_proj, down_proj], or set "
        "policy.backend=fsdp"
    )


def test_a_window_shorter_than_sequences_is_not_for_context_parallelism(demo: Demo, checkpoint: Path) -> None:
    settings = (
        "policy.max_total_sequence_length=20",
        "policy.sequence_packing.enabled=true",
        "policy.sequence_packing.share_prompts=true",
        "policy.megatron_cfg.context_parallel_size=2",
    )
    write_checkpoint(checkpoint, model_type="mistral", sliding_window=20)
    assert not [one for one in problems(demo(*settings)) if "window" in one]
    write_checkpoint(checkpoint, model_type="mistral", sliding_window=19)
    rule = "is not for a window of 19 tokens in sequences of policy.max_total_sequence_length=20"
    assert [one for one in problems(demo(*settings)) if "window" in one] == [
        f"policy.megatron_cfg.context_parallel_size=2 {rule}; set it to 1",
    ]


GPT_OSS = {
    "model_type": "gpt_oss",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
}


def test_experts_with_biases_are_whole(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, **GPT_OSS)
    assert not problems(demo("policy.sequence_packing.share_prompts=true"))
    of = "policy.megatron_cfg."
    (problem,) = problems(
        demo(
            f"{of}tensor_model_parallel_size=2",
            f"{of}expert_tensor_parallel_size=2",
            f"{of}sequence_parallel=true",
        )
    )
    assert problem == (
        f"{of}expert_tensor_parallel_size=2 must be 1 for a model of type 'gpt_oss', whose experts have "
        "biases; set it to 1"
    )


def test_engines_are_not_built_from_experts_in_mxfp4(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, **GPT_OSS, quantization_config={"quant_method": "mxfp4"})
    (problem,) = problems(demo())
    assert problem.startswith(
        f"policy.model_name={checkpoint} has weights in fewer than 16 bits (mxfp4), for"
    )
    assert not problems(demo("rollout.replay=recorded"))
    (problem,) = problems(demo("policy.backend=fsdp", "rollout.replay=recorded"))
    assert problem.endswith("(mxfp4); " + DEQUANTISE)


def test_a_dense_model_has_no_experts_to_spread(demo: Demo) -> None:
    (problem,) = problems(demo("policy.megatron_cfg.expert_model_parallel_size=2"))
    assert problem == (
        "policy.megatron_cfg.expert_model_parallel_size=2 needs a mixture of experts, and this model is of "
        "type 'qwen3'; set it to 1"
    )


def test_a_dense_model_has_no_experts_to_group(demo: Demo) -> None:
    (problem,) = problems(demo("policy.megatron_cfg.moe_grouped_gemm=true"))
    assert problem.startswith("policy.megatron_cfg.moe_grouped_gemm=true needs a mixture of experts")
    assert problem.endswith("set it to null")


def test_a_dense_model_has_no_routers_to_replay(demo: Demo, checkpoint: Path) -> None:
    key = "policy.megatron_cfg.router_replay=true"
    (problem,) = problems(demo(key))
    assert problem == f"{key} needs a mixture of experts, and this model is of type 'qwen3'; set it to false"
    write_checkpoint(checkpoint, **EXPERTS)
    assert not problems(demo(key))


def test_experts_with_tensor_parallelism_need_sequence_parallelism(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, **EXPERTS)
    tensor_parallel = "policy.megatron_cfg.tensor_model_parallel_size=2"
    (problem,) = problems(demo(tensor_parallel))
    assert problem.startswith("policy.megatron_cfg.sequence_parallel=false must be true for a mixture")
    assert not problems(demo(tensor_parallel, "policy.megatron_cfg.sequence_parallel=true"))


def test_an_engine_may_have_more_ranks_than_key_value_heads_but_a_multiple_of_them(
    demo: Demo, checkpoint: Path
) -> None:
    assert not problems(demo("generation.vllm_cfg.tensor_parallel_size=4"))
    write_checkpoint(checkpoint, num_attention_heads=12, num_key_value_heads=3)
    (problem,) = problems(demo("generation.vllm_cfg.tensor_parallel_size=2"))
    assert problem.endswith("must divide the model's 3 key-value heads, or be a multiple of them; try 1 or 3")


def test_sequences_must_fit_into_the_models_context(demo: Demo) -> None:
    (problem,) = problems(demo("policy.max_total_sequence_length=257"))
    assert problem.startswith(
        "policy.max_total_sequence_length=257 must be at most the model's max_position_embeddings=256"
    )


def test_parameters_of_the_tiny_qwen3_add_up(checkpoint: Path) -> None:
    # embeddings 64*128, tied; per layer q 128*128, k and v 2*128*64, o 128*128, q and k norms 2*32,
    # three FFN matrices 128*384, two norms 2*128; final norm 128.
    layer = 16384 + 16384 + 16384 + 64 + 147456 + 256
    assert read_model_info(str(checkpoint), "megatron").num_parameters == 8192 + 2 * layer + 128 == 402_176


def test_parameters_of_known_models_add_up(tmp_path: Path) -> None:
    qwen25 = write_checkpoint(
        tmp_path / "Qwen2.5-0.5B",
        model_type="qwen2",
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=None,
        vocab_size=151936,
    )
    assert read_model_info(str(qwen25), "megatron").num_parameters == 494_032_768
    llama = write_checkpoint(
        tmp_path / "Llama-3.1-8B",
        model_type="llama",
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=None,
        vocab_size=128256,
        tie_word_embeddings=False,
    )
    assert read_model_info(str(llama), "megatron").num_parameters == 8_030_261_248


def test_parameters_of_a_mixture_count_every_expert_and_the_router(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "moe", **EXPERTS, num_hidden_layers=1)
    attention = 16384 + 16384 + 16384 + 64
    assert read_model_info(str(path), "megatron").num_parameters == (
        8192 + attention + 6 * (3 * 128 * 33 + 128) + 256 + 128
    )


def test_a_mixture_with_layers_without_experts_is_refused(demo: Demo, checkpoint: Path) -> None:
    write_checkpoint(checkpoint, **EXPERTS, decoder_sparse_step=2)
    (problem,) = problems(demo())
    assert "has layers without experts" in problem


def test_reading_a_checkpoint_without_config_raises(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_model_info(str(tmp_path), "megatron")


@pytest.mark.parametrize("value", ["<eos>", [5, "<eos>"], True, -1, 2.0])
def test_an_eos_token_that_is_no_id_is_refused_with_its_file(
    demo: Demo, checkpoint: Path, value: object
) -> None:
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    (problem,) = problems(demo())
    assert f"generation_config.json: eos_token_id={json.dumps(value)} must be a token id or a list" in problem
