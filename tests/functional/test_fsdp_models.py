"""The FSDP2 backend trains causal language models of any architecture, samples packed end to end.

One process runs a log-prob phase and an optimizer update of each; the dense reference does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    GraniteConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.meta import GlobalBatch, MicroBatch, Schedule
from nemo_like.batch.micro_batches import sequence_packing
from nemo_like.cluster.coordinates import Coordinates, ParallelLayout
from nemo_like.policy.options import PolicyConfig
from tests.functional.dense_reference import DenseReference
from tests.functional.policy_fixtures import PAD_ID, VOCAB_SIZE, loss_config, policy_config, random_batch
from tests.functional.worlds import run_world

NUM_SAMPLES, TOKENS_PER_MICRO_BATCH = 6, 64
TEMPERATURE = 0.8
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
MODELS: dict[str, Callable[[], PreTrainedConfig]] = {
    "GPT-2: learnt positions, transposed weights, dropout": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=32, n_head=4, n_layer=2, n_positions=64
    ),
    "Mistral: every layer with a sliding window": lambda: MistralConfig(**SIZES, sliding_window=4),
    "Gemma 3: some layers with a sliding window": lambda: Gemma3TextConfig(
        **SIZES, pad_token_id=PAD_ID, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "Granite: scaled logits": lambda: GraniteConfig(**SIZES, logits_scaling=3.0),
    "OPT: whole layers left out in training": lambda: OPTConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        word_embed_proj_dim=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        layerdrop=0.5,
    ),
    "Mixtral: a router that sees noise in training": lambda: MixtralConfig(
        **SIZES, num_local_experts=4, router_jitter_noise=0.3, pad_token_id=PAD_ID
    ),
    "Qwen3-MoE: experts fused in memory": lambda: Qwen3MoeConfig(
        **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, output_router_logits=False
    ),
    "GLM-4.5: routers with biases that do not train": lambda: Glm4MoeConfig(
        **SIZES, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, first_k_dense_replace=1
    ),
}


@dataclass(frozen=True)
class ModelReport:
    logprobs: torch.Tensor
    metrics: dict[str, float]
    announced: list[tuple[str, tuple[int, ...]]]


def packed_schedule(batch: dict[str, Any]) -> Schedule:
    """All samples in one update."""
    strategy = sequence_packing(TOKENS_PER_MICRO_BATCH)
    lengths = [batch["lengths"]]
    cut = strategy.cut(lengths)
    micro_batches = tuple(
        MicroBatch(tuple(rows), length)
        for rows, length in zip(cut[0], strategy.common_lengths(lengths, cut), strict=True)
    )
    trained = [row for row in range(NUM_SAMPLES) if batch["tags"]["sample_mask"][row]]
    num_tokens = sum(batch["tags"]["num_response_tokens"][row] for row in trained)
    return Schedule((GlobalBatch(len(trained), num_tokens, micro_batches),), strategy.layout)


def score_and_train(
    coordinates: Coordinates, cfgs: dict[str, PolicyConfig], loss: LossConfig, batch: dict[str, Any]
) -> dict[str, ModelReport]:
    """In a process of its own: every model in turn, exported beside its checkpoint."""
    from nemo_like.policy.batch.policy_batch import PolicyBatch
    from nemo_like.policy.fsdp.backend import FSDPBackend
    from nemo_like.policy.loss.objective import PolicyObjective

    reports = {}
    tags = {name: batch["tags"][name] for name in ("advantage", "sample_mask")}
    for name, cfg in cfgs.items():
        policy = FSDPBackend(cfg, PolicyObjective(loss, TEMPERATURE), coordinates)
        schedule = packed_schedule(batch)
        columns = dict(batch["columns"])
        logprobs = policy.logprobs(PolicyBatch(columns, batch["lengths"], tags, policy.device), schedule)
        columns["prev_logprobs"] = logprobs
        metrics = policy.train(PolicyBatch(columns, batch["lengths"], tags, policy.device), schedule)
        policy.export_hf(Path(cfg.model_name).with_name("export"))
        reports[name] = ModelReport(
            logprobs,
            {key: metric.value for key, metric in metrics.items()},
            [(spec.name, spec.shape) for spec in policy.weight_metadata()],
        )
    return reports


def save_model(config: PreTrainedConfig, path: Path) -> Path:
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.normal_()
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def batch() -> dict[str, Any]:
    return random_batch(NUM_SAMPLES)


@pytest.fixture(scope="module")
def cfgs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PolicyConfig]:
    return {
        name: policy_config(
            save_model(config(), tmp_path_factory.mktemp("model") / "checkpoint"), backend="fsdp"
        )
        for name, config in MODELS.items()
    }


@pytest.fixture(scope="module")
def reports(cfgs: dict[str, PolicyConfig], batch: dict[str, Any]) -> dict[str, ModelReport]:
    layout = ParallelLayout(tp=1, cp=1, dp=1, pp=1)
    return run_world(score_and_train, layout, cfgs, loss_config(), batch)[0]


@pytest.mark.parametrize("name", MODELS)
def test_a_step_equals_the_dense_models(
    name: str, cfgs: dict[str, PolicyConfig], reports: dict[str, ModelReport], batch: dict[str, Any]
) -> None:
    cfg, report = cfgs[name], reports[name]
    dense = DenseReference(cfg, loss_config(), TEMPERATURE)
    dense.model.eval()  # no dropout
    prev = [logprobs.detach() for logprobs in dense.logprobs(batch)]
    torch.testing.assert_close(report.logprobs, torch.cat(prev), rtol=0, atol=1e-5)
    update = dense.update(batch, list(range(NUM_SAMPLES)), prev, None, report.metrics["lr"])
    assert report.metrics["loss"] == pytest.approx(update.loss, abs=1e-5)
    assert report.metrics["grad_norm"] == pytest.approx(update.grad_norm, rel=1e-4)
    exported = AutoModelForCausalLM.from_pretrained(Path(cfg.model_name).with_name("export"))
    for key, weight in dense.model.state_dict().items():
        torch.testing.assert_close(exported.state_dict()[key], weight, rtol=0, atol=1e-4, msg=key)


@pytest.mark.parametrize("name", MODELS)
def test_weights_travel_under_the_names_of_the_checkpoint(
    name: str, cfgs: dict[str, PolicyConfig], reports: dict[str, ModelReport]
) -> None:
    with safe_open(Path(cfgs[name].model_name) / "model.safetensors", framework="pt") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    assert dict(reports[name].announced) == stored


def test_a_model_that_caps_its_logits_is_refused(tmp_path: Path, batch: dict[str, Any]) -> None:
    config = Gemma2Config(**SIZES, final_logit_softcapping=2.0)
    cfg = policy_config(save_model(config, tmp_path / "checkpoint"), backend="fsdp")
    layout = ParallelLayout(tp=1, cp=1, dp=1, pp=1)
    with pytest.raises(AssertionError, match="does not compute its logits as a multiple of hidden states"):
        run_world(score_and_train, layout, {"Gemma 2": cfg}, loss_config(), batch)
