"""Tokenizers of 64 ids that put special tokens around a text by themselves, as those of Llama and T5 do."""

from __future__ import annotations

from pathlib import Path

from tokenizers import processors
from transformers import AutoTokenizer

from nemo_like.data.tokenizer import Tokenizer
from scripts.demo_model.tiny_tokenizer import save_tokenizer, vocabulary

BOS = "<s>"
BOS_ID = vocabulary((BOS,))[BOS]


def save_with_post_processor(
    directory: Path, single: str, chat_template: str | None = None, eos: str = "<eos>"
) -> None:
    """Save a tokenizer whose post-processor puts around a text, ``$A``, what ``single`` says."""
    save_tokenizer(directory, (BOS,))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.bos_token = BOS
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (BOS, eos)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=ids
    )
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(directory)


def with_post_processor(directory: Path, single: str, chat_template: str | None = None) -> Tokenizer:
    save_with_post_processor(directory, single, chat_template)
    return Tokenizer(directory)
