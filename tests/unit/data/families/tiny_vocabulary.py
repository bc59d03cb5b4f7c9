"""Tokenizers of the two kinds that model families have, with a vocabulary of a few words.

Each word of a text is one token, so that what a model reads can be looked at.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import pairwise

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

# How GPT-4's tokenizer and its successors cut texts; ``digits`` is how many make one piece at most.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,{digits}}}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level(texts: Iterable[str], special: Sequence[str], *, digits: int = 3) -> Tokenizer:
    """Return a byte-level BPE, as GPT-2 has it: a text is cut into pieces, and their bytes are merged."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [word.replace(" ", "Ġ") for word in _words(texts, " ")]
    tokenizer = Tokenizer(_merged(alphabet, words, special))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES.format(digits=digits)), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def sentence_piece(texts: Iterable[str], special: Sequence[str], *, prefix: str) -> Tokenizer:
    """Return a BPE as SentencePiece makes it, with tokens for bytes: spaces are ▁ and part of the words.

    ``prefix`` says where a ▁ is put that no text has: "never", as in Gemma, "first", at the beginning of the
    whole text, as in later Mistral, or "always", also after special tokens, as in Llama 2.
    """
    alphabet = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(_merged(alphabet, _words(texts, "▁"), special, byte_fallback=True))
    spaces = normalizers.Replace(" ", "▁")
    if prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    else:
        before = [normalizers.Prepend("▁")] if prefix == "always" else []
        tokenizer.normalizer = normalizers.Sequence([*before, spaces])
    stripped = [] if prefix == "never" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped]
    )
    return tokenizer


def with_bos(tokenizer: Tokenizer, bos: str) -> Tokenizer:
    """Have the tokenizer put ``bos``, one of its tokens, before every text."""
    tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def _words(texts: Iterable[str], space: str) -> list[str]:
    """Return the words of the texts, each with a space before it and without."""
    found = dict.fromkeys(word for text in texts for word in re.findall(r"[A-Za-z]+", text))
    return [spaced for word in found for spaced in (word, f"{space}{word}")]


def _merged(
    alphabet: Sequence[str], words: Sequence[str], special: Sequence[str], *, byte_fallback: bool = False
) -> models.BPE:
    """Return a BPE model in which each word is one token: the pieces that earlier merges leave of it are
    merged from left to right."""
    merges: dict[tuple[str, str], int] = {}
    for word in words:
        pieces = _pieces(word, merges)
        while len(pieces) > 1:
            merges[pieces[0], pieces[1]] = len(merges)
            pieces = _pieces(word, merges)
    tokens = dict.fromkeys((*special, *alphabet, *("".join(pair) for pair in merges)))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    return models.BPE(vocabulary, list(merges), byte_fallback=byte_fallback, fuse_unk=byte_fallback)


def _pieces(word: str, merges: dict[tuple[str, str], int]) -> list[str]:
    pieces = list(word)
    while known := [(merges[pair], place) for place, pair in enumerate(pairwise(pieces)) if pair in merges]:
        _, place = min(known)
        pieces[place : place + 2] = ["".join(pieces[place : place + 2])]
    return pieces
