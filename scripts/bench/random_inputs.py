"""A random model and batches of random tokens, for benchmarks of the policy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from nemo_like.batch.columns import INPUT_IDS, RESPONSE_MASK
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.batch.tags import ADVANTAGE, SAMPLE_MASK

Samples = tuple[KVBatchMeta, dict[str, np.ndarray]]


def random_model(directory: Path, max_tokens: int, vocab_size: int, num_layers: int) -> Path:
    """Write a small Qwen3 with random weights and tied embeddings; return its checkpoint directory."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(directory / "model")
    return directory / "model"


def random_samples(model: Path, lengths: Sequence[int], prompt_tokens: int, group_size: int) -> Samples:
    """Return a batch of random tokens and its columns. Each group's samples begin with the same prompt."""
    rng = np.random.default_rng(0)
    group_ids = [row // group_size for row in range(len(lengths))]
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    mask = np.concatenate([np.r_[np.zeros(prompt_tokens), np.ones(n - prompt_tokens)] for n in lengths])
    meta = KVBatchMeta(
        partition="bench",
        chunks=(Chunk("all", tuple(lengths)),),
        rows=tuple((0, row) for row in range(len(lengths))),
        columns=frozenset(),
        tags={
            SAMPLE_MASK.name: (1.0,) * len(lengths),
            "num_response_tokens": tuple(n - prompt_tokens for n in lengths),
            "num_prompt_tokens": (prompt_tokens,) * len(lengths),
            "group_id": tuple(group_ids),
            ADVANTAGE.name: tuple(float(value) for value in rng.normal(size=len(lengths))),
        },
    )
    ids = rng.integers(0, vocabulary, sum(lengths)).astype(np.int32)
    starts = np.cumsum(lengths) - lengths
    for start, group in zip(starts, group_ids, strict=True):
        first = starts[group * group_size]
        ids[start : start + prompt_tokens] = ids[first : first + prompt_tokens]
    return meta, {INPUT_IDS.name: ids, RESPONSE_MASK.name: mask.astype(np.uint8)}
