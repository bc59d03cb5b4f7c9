from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.models.model_info import read_model_info
from nemo_like.rules.checkpoint_rules import checkpoint_problems
from nemo_like.rules.rules import validate
from tests.unit.config.checkpoints import write_checkpoint

Demo = Callable[..., Config]
FSDP = "policy.backend=fsdp"


def problems(cfg: Config) -> list[str]:
    try:
        validate(cfg)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize("more", [[], ["policy.lora.enabled=true"]], ids=["whole", "adapters"])
def test_both_backends_run_the_demo(demo: Demo, more: list[str]) -> None:
    assert problems(demo(*more)) == problems(demo(FSDP, *more)) == []


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            [FSDP, "policy.megatron_cfg.router_replay=true"],
            "policy.megatron_cfg.router_replay=true is for policy.backend=megatron, but that is fsdp; set it "
            "to false, or policy.backend=megatron",
        ),
        (
            [FSDP, "policy.megatron_cfg.tensor_model_parallel_size=2"],
            "policy.megatron_cfg.tensor_model_parallel_size=2 is for policy.backend=megatron, but that is "
            "fsdp; set it to 1, or policy.backend=megatron",
        ),
        (
            ["policy.lora.enabled=true", "policy.lora.target_modules=[q_proj,v_prj]"],
            "policy.lora.target_modules=[q_proj, v_prj] names v_prj, and policy.backend=megatron has "
            "adapters for q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, or for "
            "[all-linear]; did you mean v_proj?",
        ),
        (
            ["policy.fsdp_cfg.tensor_parallel_size=2"],
            "policy.fsdp_cfg.tensor_parallel_size=2 is for policy.backend=fsdp, but that is megatron; set it "
            "to 1, or policy.backend=fsdp",
        ),
        (
            [FSDP, "policy.fsdp_cfg.cpu_offload=true"],
            "policy.fsdp_cfg.cpu_offload=true moves nothing with policy.device=cpu; set it to false",
        ),
        (
            [FSDP, "policy.lora.enabled=true", "policy.lora.target_modules=[]"],
            "policy.lora.target_modules=[] leaves no layer, so nothing would train; [all-linear] is usual, "
            "with policy.lora.exclude_modules=[]",
        ),
        (
            [FSDP, "policy.lora.rank=0"],
            "policy.lora.rank=0 must be at least 1",
        ),
        (
            [FSDP, "policy.fsdp_cfg.tensor_parallel_size=3"],
            "policy.fsdp_cfg.tensor_parallel_size=3 must divide the model's 4 attention heads and its 2 "
            "key-value heads; try 2",
        ),
    ],
)
def test_what_a_backend_cannot_do_is_refused(demo: Demo, overrides: list[str], problem: str) -> None:
    assert problems(demo(*overrides)) == [problem]


def write_gpt2(directory: Path) -> Path:
    """GPT-2, which has other names for its sizes, with one weight of 6 x 4 scalars and one of 5."""
    write_checkpoint(directory)
    sizes = {"n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 64, "vocab_size": 6}
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes}))
    tensors = {"wte": {"shape": [6, 4]}, "bias": {"shape": [5]}, "__metadata__": {"format": "pt"}}
    header = json.dumps(tensors).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return directory


def test_fsdp_reads_a_model_of_any_type(demo: Demo, tmp_path: Path) -> None:
    path = write_gpt2(tmp_path / "gpt2")
    model = read_model_info(str(path), "fsdp")
    assert (model.hidden_size, model.intermediate_size, model.num_heads, model.num_kv_heads) == (
        128,
        512,
        4,
        4,
    )
    assert (model.num_layers, model.max_position_embeddings) == (3, 64)
    assert model.num_parameters == 6 * 4 + 5
    assert not list(checkpoint_problems(demo(FSDP, f"policy.model_name={path}")))
    (problem,) = checkpoint_problems(demo(f"policy.model_name={path}"))
    assert "policy.backend=fsdp trains others too" in str(problem)
