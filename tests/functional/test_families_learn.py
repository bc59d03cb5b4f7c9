"""Whole runs in which tiny models of families with parts of their own learn to add.

A short supervised warm start makes each model, as it makes the demo's, and GRPO does the rest.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from transformers import DeepseekV3Config, Gemma3TextConfig, GptOssConfig, PreTrainedConfig

from scripts.demo_model.tiny_tokenizer import save_tokenizer
from scripts.demo_model.warm_start import tiny_sizes, warm_start
from tests.functional.runs import FEWEST_PROCESSES, run_grpo

pytestmark = [pytest.mark.timeout(1200), pytest.mark.slow, pytest.mark.whole_run]

NUM_STEPS = 40
# In the first of two layers, and shorter than a sample.
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
# Models without norms of queries and keys begin with larger weights.
WITHOUT_QK_NORM = {"initializer_range": 0.05, "tie_word_embeddings": False}


def latent_attention() -> PreTrainedConfig:
    """A dense layer, and one of eight experts in four groups beside a shared one. vLLM's latent attention on
    CPUs has these latents alone."""
    attention = {"q_lora_rank": None, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32}
    attention |= {"num_key_value_heads": 4, "head_dim": 64, "v_head_dim": 32, "rms_norm_eps": 1e-6}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    experts |= {"n_shared_experts": 1, "n_group": 4, "topk_group": 1, "routed_scaling_factor": 1.5}
    return DeepseekV3Config(
        **{**tiny_sizes(128), **WITHOUT_QK_NORM, **attention, **experts, "first_k_dense_replace": 1}
    )


def sinks() -> PreTrainedConfig:
    """Sinks, a window, YaRN, and eight experts with biases in each layer."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    yarn |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 128}
    of_family = {"rms_norm_eps": 1e-5, "rope_parameters": yarn, **WINDOW, **experts}
    return GptOssConfig(**{**tiny_sizes(128), **WITHOUT_QK_NORM, **of_family})


def post_norms() -> PreTrainedConfig:
    """Norms on both sides of a layer's parts, a window with a rope of its own, and scaled embeddings."""
    thetas = {"sliding_attention": 1e3, "full_attention": 1e4}
    ropes = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    of_family: dict[str, Any] = {"query_pre_attn_scalar": 32, "rope_parameters": ropes, **WINDOW}
    return Gemma3TextConfig(**{**tiny_sizes(128), **of_family})


@pytest.mark.parametrize(
    ("config", "first_rate", "rate"),
    [
        pytest.param(latent_attention(), 1.5e-3, 3e-4, id="deepseek_v3"),
        pytest.param(sinks(), 1.5e-3, 3e-4, id="gpt_oss"),
        pytest.param(post_norms(), 3e-3, 5e-4, id="gemma3_text"),
    ],
)
def test_a_family_learns_to_add(
    config: PreTrainedConfig, first_rate: float, rate: float, tmp_path: Path
) -> None:
    """``first_rate`` is the learning rate of the warm start, ``rate`` that of GRPO."""
    made = warm_start(config, digits=2, seed=1, target_accuracy=0.3, learning_rate=first_rate)
    made.model.save_pretrained(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    run = run_grpo(
        tmp_path,
        [
            *(f"policy.model_name={tmp_path / 'model'}", f"policy.optimizer.lr={rate}"),
            *("policy.scheduler.warmup_updates=12", f"grpo.max_num_steps={NUM_STEPS}"),
            *(f"grpo.val_period={NUM_STEPS}", "checkpointing.enabled=false", *FEWEST_PROCESSES),
        ],
        timeout_s=600,
    )
    assert run.returncode == 0, run.output
    rewards = run.metrics("train/reward")
    assert len(rewards) == NUM_STEPS
    # Samples of a policy that stays as it is differ by some 0.03 between steps.
    assert fmean(rewards[-3:]) > fmean(rewards[:3]) + 0.12
    first, last = run.metrics("validation/accuracy")
    assert last > first + 0.12
    assert max(run.metrics("train/token_mult_prob_error")) < 1.0001
