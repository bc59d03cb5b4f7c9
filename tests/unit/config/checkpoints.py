"""A tiny checkpoint directory whose weights are empty: enough for everything that only reads config.json."""

from __future__ import annotations

import json
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
DEMO = REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml"
# The demo's micro-batches made as most do it.
PADDED = (
    "policy.sequence_packing.enabled=false",
    "policy.sequence_packing.share_prompts=false",
    "policy.train_micro_batch_size=64",
    "policy.logprob_batch_size=128",
)
# Adds the pass that scores before training, which the demo has not.
SCORED = "loss_fn.use_generation_logprobs_as_prev=false"

TINY_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 64,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


def write_checkpoint(directory: Path, **changes: object) -> Path:
    """All files of a checkpoint, the weights being empty; null in ``changes`` removes a key."""
    directory.mkdir(parents=True, exist_ok=True)
    content = {key: value for key, value in {**TINY_QWEN3, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(content))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (directory / name).touch()
    return directory


def hub_snapshot(cache: Path, name: str) -> Path:
    """Make the folder of a checkpoint OWNER/NAME in a cache of the Hugging Face hub, as its library lays it
    out, and return it."""
    repository = cache / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("abc")
    snapshot = repository / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    return snapshot
