"""A character-level tokenizer with 64 ids, saved as any Hugging Face tokenizer is."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 64
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
_CHARACTERS = "0123456789+-*= \n?abcdefghijklmnopqrstuvwxyz"


@cache
def vocabulary(special: tuple[str, ...] = ()) -> dict[str, int]:
    """Return the id of every token; those of ``special`` come after the characters. Every id has a token,
    also those to which no text is encoded, so that anything sampled can be decoded."""
    tokens = [PAD, EOS, UNKNOWN, *_CHARACTERS, *special]
    tokens += [f"<unused{i}>" for i in range(VOCABULARY_SIZE - len(tokens))]
    return {token: index for index, token in enumerate(tokens)}


def save_tokenizer(directory: Path, special: tuple[str, ...] = ()) -> None:
    """Write the tokenizer files that ``AutoTokenizer.from_pretrained(directory)`` reads.

    Text that is one of ``special`` is one token.
    """
    tokenizer = Tokenizer(models.WordLevel(vocabulary(special), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        additional_special_tokens=list(special),
        clean_up_tokenization_spaces=False,
    ).save_pretrained(directory)
