"""Tiny models of every family that vLLM's build for CPUs computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_like.models.family import FAMILIES, Part
from tests.functional.policy_fixtures import make_checkpoint

# vLLM's attention on CPUs has no smaller heads, and its experts are multiples of 32 wide.
_SIZES = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 32}
_EXPERTS = {"moe_intermediate_size": 64}
# Its kernel for latent attention has one size of latents.
_LATENTS = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
# Engines for families that vLLM's on CPUs refuses, by family.
ENGINES = {"minimax_m2": "tests.functional.one_group_engine:OneGroupEngine"}


def make_engine_checkpoint(path: Path, family: str) -> Path:
    """A random checkpoint of the family, large enough for engines on CPUs."""
    kind = FAMILIES.load(family)
    sizes: dict[str, Any] = {**_SIZES}
    if kind.mixture and kind.mixture.expert_size in _EXPERTS:
        sizes |= _EXPERTS
    if Part.mla in kind.parts:
        sizes |= {**_LATENTS, "head_dim": _LATENTS["qk_rope_head_dim"]}
    if family == "minimax_m2":
        sizes["rotary_dim"] = 16
    return make_checkpoint(path, family, tied=kind.defaults.get("tie_word_embeddings", False), **sizes)
