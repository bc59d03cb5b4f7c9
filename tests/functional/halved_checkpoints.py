"""Checkpoints of ``halved_llama``, which bring its code or need a library that knows it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from scripts.demo_model.tiny_tokenizer import EOS, PAD, VOCABULARY_SIZE, save_tokenizer, vocabulary
from tests.functional import halved_llama
from tests.functional.halved_llama import HalvedConfig, HalvedForCausalLM

OF_MODEL = {
    "AutoConfig": "halved_llama.HalvedConfig",
    "AutoModel": "halved_llama.HalvedModel",
    "AutoModelForCausalLM": "halved_llama.HalvedForCausalLM",
}
OF_TOKENIZER = {"AutoTokenizer": [None, "halved_llama.HalvedTokenizer"]}


def halved_checkpoint(path: Path, *, with_code: bool = True, seed: int = 5, **sizes: Any) -> Path:
    """A random checkpoint with the demo's tokenizer. Without code no file says how it is computed."""
    config = HalvedConfig(
        **{
            "vocab_size": VOCABULARY_SIZE,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,  # vLLM's attention on CPUs has no smaller heads
            "max_position_embeddings": 128,
            "initializer_range": 0.15,
            "bos_token_id": None,
            "eos_token_id": vocabulary()[EOS],
            "pad_token_id": vocabulary()[PAD],
            **sizes,
        }
    )
    torch.manual_seed(seed)
    HalvedForCausalLM(config).save_pretrained(path)
    save_tokenizer(path)
    if with_code:
        shutil.copy(halved_llama.__file__, path)
        _add(path / "config.json", auto_map=OF_MODEL)
        _add(path / "tokenizer_config.json", auto_map=OF_TOKENIZER, tokenizer_class="HalvedTokenizer")
    return path


def _add(file: Path, **entries: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **entries}))
