"""Checks that a checkpoint has the files it needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_like.config.problems import Problem

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def missing_files(key: str, path: Path) -> Iterator[Problem]:
    """Yield a problem for each kind of file that the checkpoint in ``path``, the value of ``key``, lacks."""
    if not any(path.glob("*.safetensors")):
        remedy = "save the model with save_pretrained, or download it completely"
        yield Problem(key=key, rule="has no weights (*.safetensors)", remedy=remedy)
    has_vocabulary = any((path / file).is_file() for file in _TOKENIZER_FILES)
    if not has_vocabulary or not (path / "tokenizer_config.json").is_file():
        rule = f"has no tokenizer (tokenizer_config.json and one of {', '.join(_TOKENIZER_FILES)})"
        yield Problem(key=key, rule=rule, remedy="save the tokenizer there with save_pretrained")
