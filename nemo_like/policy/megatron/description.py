"""What a Hugging Face ``config.json`` says of a Llama, Qwen2, Qwen3 or Qwen3-MoE model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.policy.megatron.convert import Geometry

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe")

# The one rope scaling that Megatron-core implements, that of Llama 3.1 (the factor is free).
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The experts of every layer."""

    num_experts: int
    num_experts_per_token: int
    normalises_chosen: bool  # the chosen experts' weights sum to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """What config.json says, in plain numbers."""

    model_type: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int  # of one expert in a mixture
    mixture: Mixture | None
    num_attention_heads: int
    num_query_groups: int
    head_size: int
    vocab_size: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling_factor: float | None
    max_position_embeddings: int
    has_qkv_bias: bool
    has_qk_norm: bool
    is_tied: bool

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding: the vocabulary rounded up to a multiple of the tensor-parallel ranks."""
        return -(-self.vocab_size // tp) * tp

    def geometry(self, tp: int) -> Geometry:
        return Geometry(
            num_attention_heads=self.num_attention_heads,
            num_query_groups=self.num_query_groups,
            head_size=self.head_size,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab_size(tp),
        )


def describe_model(path: Path) -> ModelDescription:
    """Read ``path/config.json``.

    Raises FileNotFoundError without the file, ValueError for a model type or a feature that the
    conversion does not cover.
    """
    file = path / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"policy.model_name={path} holds no config.json; give a checkpoint directory")
    config = json.loads(file.read_text())
    model_type = config.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ValueError(
            f"{file}: model_type={model_type!r} is not one of {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if config.get(key):
            raise ValueError(f"{file}: {key}=true is not supported; use a checkpoint without it")
    rope_theta, rope_scaling_factor = _rope(config, file)
    mixture = _mixture(config, file) if model_type == "qwen3_moe" else None
    heads = config["num_attention_heads"]
    return ModelDescription(
        model_type=model_type,
        num_layers=config["num_hidden_layers"],
        hidden_size=config["hidden_size"],
        ffn_hidden_size=config["intermediate_size" if mixture is None else "moe_intermediate_size"],
        mixture=mixture,
        num_attention_heads=heads,
        num_query_groups=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or config["hidden_size"] // heads,
        vocab_size=config["vocab_size"],
        norm_epsilon=config["rms_norm_eps"],
        rope_theta=rope_theta,
        rope_scaling_factor=rope_scaling_factor,
        max_position_embeddings=config["max_position_embeddings"],
        has_qkv_bias=model_type == "qwen2",
        has_qk_norm=model_type in ("qwen3", "qwen3_moe"),
        is_tied=bool(config.get("tie_word_embeddings", False)),
    )


def _mixture(config: dict[str, Any], file: Path) -> Mixture:
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError(f"{file}: layers without experts are not supported; every layer must be a mixture")
    return Mixture(
        num_experts=config.get("num_local_experts") or config["num_experts"],  # transformers 5, or before
        num_experts_per_token=config["num_experts_per_tok"],
        normalises_chosen=bool(config["norm_topk_prob"]),
    )


def _rope(config: dict[str, Any], file: Path) -> tuple[float, float | None]:
    """(theta, Llama 3.1 scaling factor or None), from the key of transformers 5 or those before it."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    differing = {key: rope.get(key) for key, value in _LLAMA3_ROPE.items() if rope.get(key) != value}
    if kind != "llama3" or differing:
        raise ValueError(f"{file}: rope scaling {rope} is not supported; only none and that of Llama 3.1 are")
    return theta, float(rope["factor"])
