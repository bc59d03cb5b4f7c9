"""What a checkpoint directory says about its model, read without loading it or any library for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.config.errors import ConfigError, Problem

SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3")

_KEY = "policy.model_name"
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
)
_UNSUPPORTED_FEATURES = ("attention_bias", "mlp_bias", "use_sliding_window")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """The sizes of a Llama, Qwen2 or Qwen3 model."""

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    max_position_embeddings: int
    has_tied_embeddings: bool

    @property
    def num_parameters(self) -> int:
        """Trainable scalars; tied embeddings count once."""
        query = self.num_heads * self.head_size
        key_value = 2 * self.num_kv_heads * self.head_size
        attention = self.hidden_size * (query + key_value) + query * self.hidden_size
        if self.model_type == "qwen2":
            attention += query + key_value  # biases
        if self.model_type == "qwen3":
            attention += 2 * self.head_size  # norms of queries and keys
        mlp = 3 * self.hidden_size * self.intermediate_size
        embeddings = self.vocab_size * self.hidden_size * (1 if self.has_tied_embeddings else 2)
        layers = self.num_layers * (attention + mlp + 2 * self.hidden_size)
        return embeddings + layers + self.hidden_size


def read_model_info(model_name: str) -> ModelInfo:
    """Sizes from ``config.json``. Raises ConfigError when it is missing, broken or of an unknown model."""
    path = Path(model_name) / "config.json"
    if not path.is_file():
        raise _error(model_name, "has no config.json", "point it at a Hugging Face checkpoint directory")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise _error(model_name, f"has a config.json that is not valid JSON ({error})", "") from error
    if not isinstance(content, dict):
        raise _error(model_name, "has a config.json that is not a JSON object", "")
    model_type = content.get("model_type")
    if model_type not in SUPPORTED_MODEL_TYPES:
        supported = ", ".join(SUPPORTED_MODEL_TYPES)
        raise _error(model_name, f"is a model of type {model_type!r}", f"supported are {supported}")
    bad = [name for name in _REQUIRED if not _is_size(content.get(name))]
    if bad:
        raise _error(model_name, f"has a config.json without a positive integer for {', '.join(bad)}", "")
    for name in _UNSUPPORTED_FEATURES:
        if content.get(name):
            raise _error(
                model_name, f"has {name}=true, which is not supported", "use a checkpoint without it"
            )
    return _model_info(content)


def _model_info(content: Mapping[str, Any]) -> ModelInfo:
    num_heads = content["num_attention_heads"]
    return ModelInfo(
        model_type=content["model_type"],
        hidden_size=content["hidden_size"],
        intermediate_size=content["intermediate_size"],
        num_layers=content["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=content.get("num_key_value_heads") or num_heads,
        head_size=content.get("head_dim") or content["hidden_size"] // num_heads,
        vocab_size=content["vocab_size"],
        max_position_embeddings=content["max_position_embeddings"],
        has_tied_embeddings=bool(content.get("tie_word_embeddings", False)),
    )


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _error(model_name: str, rule: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key=f"{_KEY}={model_name}", rule=rule, remedy=remedy)])
