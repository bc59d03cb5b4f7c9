#!/usr/bin/env python
"""Write a model with random weights, a tokenizer with as many ids, and prompts for it.

    python scripts/gpu_check_parts/random_model.py --output DIR --size 0.6B [--device cuda]

DIR/model gets a Qwen3 of that size, in bfloat16, and DIR/prompts.jsonl prompts of random words.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

_COMMON = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "torch_dtype": "bfloat16",
}
_QWEN = {"vocab_size": 151936, "num_hidden_layers": 28, "head_dim": 128}
_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8}
SHAPES: dict[str, dict[str, int]] = {
    "1.7B": {**_QWEN, **_HEADS, "hidden_size": 2048, "intermediate_size": 6144},
    "0.6B": {**_QWEN, **_HEADS, "hidden_size": 1024, "intermediate_size": 3072},
    "tiny": {
        "vocab_size": 512,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 64,
        "intermediate_size": 128,
    },
}
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_NUM_PROMPTS, _PROMPT_WORDS = 512, 32


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--size", choices=list(SHAPES), required=True)
    parser.add_argument("--device", default="cpu", help="where the weights are drawn (default cpu)")
    options = parser.parse_args()
    model = options.output / "model"
    write_config(model, options.size)
    _write_tokenizer(model, SHAPES[options.size]["vocab_size"])
    _write_prompts(options.output / "prompts.jsonl", SHAPES[options.size]["vocab_size"])
    write_weights(model, options.device)
    return 0


def write_config(model: Path, size: str) -> None:
    """Write config.json alone, which says how much memory a run needs."""
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(_COMMON | SHAPES[size], indent=2) + "\n")


def write_weights(model: Path, device: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    with torch.device(device):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model), dtype=torch.bfloat16)
    made.to("cpu").save_pretrained(model)


def _write_tokenizer(model: Path, vocab_size: int) -> None:
    """Write a tokenizer with a word for every id."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [PAD, EOS, UNKNOWN, *(_word(index) for index in range(3, vocab_size))]
    vocabulary = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")  # joins words by spaces
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(model)


def _write_prompts(path: Path, vocab_size: int) -> None:
    draw = random.Random(1)
    prompts = (
        " ".join(_word(draw.randrange(3, vocab_size)) for _ in range(_PROMPT_WORDS))
        for _ in range(_NUM_PROMPTS)
    )
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": ""}) + "\n" for prompt in prompts))


def _word(index: int) -> str:
    return f"w{index}"


if __name__ == "__main__":
    sys.exit(main())
