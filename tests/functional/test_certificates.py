"""Every model family gets its certificate: engine, trainer and transformers compute alike, and so do the
modules of the first two."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from nemo_like.driver.parties import TARGETS, started_parties
from nemo_like.mismatch.certificate import certificate, random_prompts
from nemo_like.mismatch.search import NOTHING
from nemo_like.models.family import FAMILIES, Family, Part
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.plan.roles import Role
from tests.functional.engine_families import ENGINES, make_engine_checkpoint
from tests.functional.mismatch_pairs import config
from tests.functional.warm_servers import shared

pytestmark = [pytest.mark.timeout(600), pytest.mark.engine]

_QUICK = ("gemma3_text", "megatron")
# Where attention is computed past hooks: vLLM's Transformers backend calls `forward`, and FSDP's gpt-oss has
# transformers' own attention, for its sinks.
_WITHOUT_ATTENTION = {
    ("olmo2", "megatron"),
    ("olmo3", "megatron"),
    ("seed_oss", "megatron"),
    ("gpt_oss", "fsdp"),
}
_EVERYWHERE = {"embed_tokens", "norm", "logprobs"}


def _of_layer(kind: Family, *, has_attention: bool) -> set[str]:
    """What is compared of a layer at least."""
    names = {"post_attention_layernorm", "self_attn.o_proj"}
    if Part.post_norms in kind.parts:
        names.add("post_feedforward_layernorm")
    if Part.no_pre_norms not in kind.parts:
        names |= {"input", "input_layernorm", "after_attention"}
    if Part.mla in kind.parts:
        names.add("self_attn.kv_a_layernorm")
    elif has_attention:
        names |= {f"self_attn.{name}" for name in ("rotated_q", "rotated_k", "attention")}
    else:
        names.add("self_attn.v_proj")
    if Part.no_pre_norms in kind.parts:
        names |= {"self_attn.q_norm", "self_attn.k_norm"}
    return names | ({"mlp.gate", "mlp.experts"} if kind.mixture else {"mlp.activation", "mlp.down_proj"})


@pytest.mark.parametrize(
    ("family", "backend"),
    [
        pytest.param(*one, marks=() if one == _QUICK else pytest.mark.slow)
        for one in [*product(FAMILIES.names(), ["megatron"]), ("gpt_oss", "fsdp"), ("qwen3", "fsdp")]
    ],
)
def test_a_family_gets_its_certificate(family: str, backend: str, tmp_path: Path) -> None:
    model = make_engine_checkpoint(tmp_path / "model", family)
    lengths = ["policy.max_total_sequence_length=120", "generation.max_new_tokens=20"]
    cfg = config(model, f"policy.backend={backend}", "policy.optimizer.lr=3e-4", *lengths)
    targets = {**TARGETS, **({Role.engine: ENGINES[family]} if family in ENGINES else {})}
    directory = RunDirectory.create(str(tmp_path), "logs")
    with shared(), started_parties(cfg, directory, print, targets) as parties:
        found = certificate(cfg, parties, random_prompts(cfg), 2, tmp_path)
    assert (found.sentence, found.holds, len(found.comparisons)) == (NOTHING, True, 6)
    of_layer = _of_layer(FAMILIES.load(family), has_attention=(family, backend) not in _WITHOUT_ATTENTION)
    wanted = _EVERYWHERE | {f"layers.1.{name}" for name in of_layer}
    for mismatch in found.mismatches.values():
        assert wanted - mismatch.compared.excess.keys() == set()
        assert "model.norm.weight" in mismatch.weights.compared
