"""Makes the directory of a model with other entries in config.json, or with another tokenizer.

    checkpoint ──▶ a directory of links to its files ◀── config.json with the changes, the tokenizer's files

Whatever loads the model, plans it or copies its configuration takes that directory, and so has the changes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

CONFIG = "config.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
# The files of a tokenizer; those of the model are left out where it has another one.
_OF_TOKENIZERS = (
    *(
        "tokenizer*",
        "tokenization_*.py",
        "vocab.*",
        "merges.txt",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("chat_template.*", "spiece.model", "sentencepiece*.model"),
)


def changed_model(checkpoint: Path, overrides: Mapping[str, Any], tokenizer: Path | None) -> Path:
    """Return a directory with the files of ``checkpoint``, with ``overrides`` in its config.json and with the
    tokenizer in the directory ``tokenizer``; ``checkpoint`` itself when nothing changes.

    The directory is in the hub's cache on this machine, so equal changes lead to the same one. Raises
    ValueError when config.json is no JSON object.
    """
    if not overrides and tokenizer is None:
        return checkpoint
    config = json.loads((checkpoint / CONFIG).read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("config.json is no JSON object")
    files = {path.name: str(path.absolute()) for path in sorted(checkpoint.iterdir())}
    if tokenizer is not None:
        files = {name: path for name, path in files.items() if name not in _tokenizer_files(checkpoint)}
        files |= {name: str((tokenizer / name).absolute()) for name in sorted(_tokenizer_files(tokenizer))}
    files.pop(CONFIG)
    text = json.dumps(_merged(config, overrides), indent=2)
    digest = hashlib.sha256(json.dumps([text, files]).encode()).hexdigest()[:16]
    directory = _cache() / f"{checkpoint.name}-{digest}"
    if not directory.is_dir():
        _write(directory, text, files)
    return directory


def num_token_ids(tokenizer: Path) -> int:
    """Return the largest id in a directory's tokenizer.json plus one; 0 when it has no such file."""
    file = tokenizer / "tokenizer.json"
    if not file.is_file():
        return 0
    content = json.loads(file.read_text(encoding="utf-8"))
    vocabulary = content["model"].get("vocab", {})
    ids = [*vocabulary.values()] if isinstance(vocabulary, Mapping) else range(len(vocabulary))
    return 1 + max([*ids, *(token["id"] for token in content.get("added_tokens", ()))], default=-1)


def _tokenizer_files(directory: Path) -> set[str]:
    return {path.name for pattern in _OF_TOKENIZERS for path in directory.glob(pattern)}


def _merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with those of ``overrides``; mappings in both are merged alike."""
    merged = dict(config)
    for name, value in overrides.items():
        there = merged.get(name)
        is_group = isinstance(value, Mapping) and isinstance(there, Mapping)
        merged[name] = _merged(dict(there or {}), value) if is_group else value
    return merged


def _cache() -> Path:
    from huggingface_hub.constants import HF_HOME

    return Path(HF_HOME) / "nemo_like"


def _write(directory: Path, config: str, files: Mapping[str, str]) -> None:
    """Write the directory under another name, then rename it: another run may make the same."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=directory.parent))
    (made / CONFIG).write_text(config, encoding="utf-8")
    for name, path in files.items():
        (made / name).symlink_to(path)
    made.chmod(0o755)
    with suppress(OSError):  # the other run was first
        os.rename(made, directory)
    shutil.rmtree(made, ignore_errors=True)
