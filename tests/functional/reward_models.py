"""Tiny reward models: random checkpoints, as directories that a run can name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Qwen3ForSequenceClassification

from scripts.demo_model.tiny_tokenizer import PAD, VOCABULARY_SIZE, save_tokenizer, vocabulary
from scripts.demo_model.warm_start import tiny_config

CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def decoder(directory: Path, *, has_template: bool = False, **changes: Any) -> Path:
    """A Qwen3 with one label, which reads up to 256 tokens and scores the last one."""
    config = tiny_config()
    for name, value in {"num_labels": 1, "pad_token_id": vocabulary()[PAD], **changes}.items():
        setattr(config, name, value)
    return _saved(Qwen3ForSequenceClassification, config, directory, has_template)


def encoder(directory: Path) -> Path:
    """A BERT with one label, which reads up to 64 tokens and scores the first one."""
    config = BertConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=vocabulary()[PAD],
    )
    return _saved(BertForSequenceClassification, config, directory, has_template=False)


def without_tokenizer_key(directory: Path, key: str) -> Path:
    """Remove a key from the tokenizer's configuration."""
    file = directory / "tokenizer_config.json"
    content = json.loads(file.read_text())
    del content[key]
    file.write_text(json.dumps(content))
    return directory


def _saved(kind: Any, config: Any, directory: Path, has_template: bool) -> Path:
    torch.manual_seed(3)
    model = kind(config)
    for parameter in model.parameters():  # far from the small scores that a fresh model gives everything
        parameter.data *= 3
    model.save_pretrained(directory)
    save_tokenizer(directory)
    if has_template:
        (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE.read_text())
    return directory
