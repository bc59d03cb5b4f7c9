from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.generation.engine_rules import mixture_problems
from nemo_like.generation.engine_spec import EngineAdapter
from nemo_like.generation.options import LoraSync
from nemo_like.models.model_info import ModelInfo
from nemo_like.plan.derived import engine_adapter
from nemo_like.rules.rules import validate

Demo = Callable[..., Config]

ON_GPU = ("policy.device=cuda", "generation.vllm_cfg.kv_cache_gib=null")
LORA = ("policy.lora.enabled=true", "generation.lora_sync=adapter")
ATTENTION = "policy.lora.target_modules=[q_proj, v_proj]"


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
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
        (
            [*ON_GPU, "cluster.placement=colocated", "generation.weight_transport=collective"],
            "generation.weight_transport=collective",
            "NCCL carries nothing between two processes on one GPU",
        ),
        (["generation.lora_sync=adapter"], "generation.lora_sync=adapter", "policy.lora.enabled=false"),
        (
            [*LORA, "generation.weight_delta=true"],
            "generation.weight_delta=true",
            "all values of an adapter change",
        ),
        ([*LORA, "policy.lora.rank=513"], "policy.lora.rank=513", "must be at most 512"),
    ],
)
def test_what_cannot_be_sent_is_refused(demo: Demo, overrides: list[str], key: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(demo(*overrides))
    assert any(str(problem).startswith(key) and reason in str(problem) for problem in caught.value.problems)


def test_engines_know_of_adapters_only_when_they_get_them(demo: Demo) -> None:
    assert engine_adapter(demo()) is None
    assert engine_adapter(demo("policy.lora.enabled=true")) is None
    assert engine_adapter(demo(*LORA)) == EngineAdapter(16, ())
    assert engine_adapter(demo(*LORA, ATTENTION)) == EngineAdapter(16, ("q_proj", "v_proj"))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "is impossible for a mixture of experts with policy.device=cpu"),
        ((ATTENTION,), "is impossible for a mixture of experts with policy.device=cpu"),
        (ON_GPU, None),
        ((*ON_GPU, ATTENTION), None),
        (
            (*ON_GPU, "policy.lora.target_modules=[down_proj]"),
            "is not for policy.lora.target_modules=[down_proj] in a mixture of experts",
        ),
    ],
)
def test_engines_compute_adapters_in_a_mixture_on_gpus_and_outside_the_experts_alone(
    demo: Demo, overrides: tuple[str, ...], reason: str | None
) -> None:
    def model(num_experts: int | None) -> ModelInfo:
        sizes = {name: 8 for name in ModelInfo.__slots__ if name not in ("model_type", "num_experts")}
        return ModelInfo(**{**sizes, "model_type": "qwen3_moe", "num_experts": num_experts})  # type: ignore[arg-type]

    cfg = demo(*LORA, *overrides)
    told = [str(one) for one in mixture_problems(cfg.generation, cfg.policy, model(4))]
    assert [f"generation.lora_sync=adapter {reason}" in one for one in told] == [True] * (reason is not None)
    assert list(mixture_problems(cfg.generation, cfg.policy, model(None))) == []
    merged = replace(cfg.generation, lora_sync=LoraSync.merged)
    assert list(mixture_problems(merged, cfg.policy, model(4))) == []
