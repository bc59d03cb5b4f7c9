"""Layouts and models in which the search must name no module, and faults of their own in some of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.mismatch.search import NOTHING
from tests.functional.generation_fixtures import make_checkpoint
from tests.functional.mismatch_pairs import Pair, config, parties_of, points

pytestmark = [pytest.mark.timeout(600), pytest.mark.engine]


def test_an_adapter_whose_scale_differs_is_named(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", tied=True)
    cfg = config(model, "policy=fsdp_lora", f"policy.model_name='{model}'", "policy.optimizer.lr=1e-2")
    with parties_of(cfg, tmp_path) as parties:
        pair = Pair(cfg, parties)
        pair.train()  # an adapter's second matrix begins with zeros
        pair.push()
        assert pair.find().sentences == [NOTHING]
        pair.parties.ask_trainer("double_scaling", "model.layers.1.self_attn.q_proj")
        assert points(pair.find()) == ["layers.1.self_attn.q_proj"]


@pytest.mark.parametrize("backend", ["fsdp", pytest.param("megatron", marks=pytest.mark.slow)])
def test_an_adapter_of_experts_whose_scale_differs_is_named(backend: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", tied=True, num_experts=4, expert_size=64)
    named = "policy.lora.target_modules=[q_proj, gate_proj, up_proj, down_proj]"
    own = [f"policy={backend}_lora", f"policy.model_name='{model}'", "policy.optimizer.lr=1e-2", named]
    cfg = config(model, *own)
    with parties_of(cfg, tmp_path) as parties:
        pair = Pair(cfg, parties)
        pair.train()
        pair.push()
        assert pair.find().sentences == [NOTHING]
        if backend == "fsdp":
            pair.parties.ask_trainer("double_scaling", "model.layers.1.mlp.experts")
            assert points(pair.find()) == ["layers.1.mlp.experts"]


_MEGATRON = "policy.megatron_cfg"


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            [f"{_MEGATRON}.tensor_model_parallel_size=2", f"{_MEGATRON}.sequence_parallel=true"],
            id="tp 2 with sequences divided",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            [
                f"{_MEGATRON}.pipeline_model_parallel_size=2",
                "policy.sequence_packing.enabled=false",
                "generation.vllm_cfg.tensor_parallel_size=2",
            ],
            id="pp 2, and an engine of two workers",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["policy.backend=fsdp", "policy.fsdp_cfg.tensor_parallel_size=2", "policy.precision=bfloat16"],
            id="fsdp, tp 2, bfloat16",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_healthy_layout_differs_by_rounding_alone(overrides: list[str], tmp_path: Path) -> None:
    cfg = config(make_checkpoint(tmp_path / "model", tied=False), *overrides)
    with parties_of(cfg, tmp_path) as parties:
        pair = Pair(cfg, parties)
        assert pair.find().sentences == [NOTHING]
        pair.train()
        pair.push()
        found = pair.find()
    assert found.sentences == [NOTHING]
    assert set(found.compared.excess) >= _EVERYWHERE
    assert len(found.compared.excess) == 4 + 2 * 17


# Of the points of both layers.
_EVERYWHERE = {
    *("embed_tokens", "after_layers", "norm", "logprobs"),
    *(f"layers.1.{name}" for name in ("input", "after_attention", "mlp.gate_proj", "mlp.down_proj")),
    *(f"layers.0.self_attn.{name}" for name in ("q_proj", "v_proj", "rotated_k", "attention", "o_proj")),
}
