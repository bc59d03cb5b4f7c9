"""Checks that a checkpoint has the files it needs, and says how to get one that is not on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote

from nemo_like.config.problems import Problem
from nemo_like.data.options import DatasetConfig

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
# On the Hugging Face hub, the owner of models whose names begin like this.
_OWNERS = {
    "Qwen": "Qwen",
    "QwQ": "Qwen",
    "Llama": "meta-llama",
    "Meta-Llama": "meta-llama",
    "Mistral": "mistralai",
    "gemma": "google",
    "Phi": "microsoft",
    "GLM": "zai-org",
    "Kimi": "moonshotai",
    "Moonlight": "moonshotai",
}


def missing_files(key: str, path: Path) -> Iterator[Problem]:
    """Yield a problem for each kind of file that the checkpoint in ``path``, the value of ``key``, lacks."""
    if not any(path.glob("*.safetensors")):
        remedy = "save the model with save_pretrained, or download it completely"
        yield Problem(key=key, rule="has no weights (*.safetensors)", remedy=remedy)
    has_vocabulary = any((path / file).is_file() for file in _TOKENIZER_FILES)
    if not has_vocabulary or not (path / "tokenizer_config.json").is_file():
        rule = f"has no tokenizer (tokenizer_config.json and one of {', '.join(_TOKENIZER_FILES)})"
        yield Problem(key=key, rule=rule, remedy="save the tokenizer there with save_pretrained")


def how_to_get(name: str, sources: Sequence[DatasetConfig], seed: int) -> str:
    """Return the remedy for a checkpoint ``name`` that is no directory: a command that makes or downloads it.

    ``sources`` and ``seed`` are those of the run; the tiny model of the arithmetic demo depends on them.
    """
    digits = [source.digits for source in sources if source.kind == "arithmetic"]
    if digits and "arithmetic" in Path(name).name:
        own_seed = re.search(r"-s(\d+)$", name)
        is_mixture = "-moe-" in Path(name).name
        return (
            f"make it with: .venv/bin/python scripts/prepare_arithmetic.py --output {quote(name)} "
            f"--digits {digits[0]} --seed {own_seed[1] if own_seed else seed}{' --experts 8' * is_mixture} "
            f"(scripts/demo.sh{' --experts' * is_mixture} does)"
        )
    path = Path(name)
    if path.name.startswith("shapes-s"):
        return "scripts/demo.sh --images makes it, and its pictures"
    if path.name.startswith("sums-s"):
        return "bash scripts/demo.sh --agent makes it, and its problems"
    if len(path.parts) == 2 and not path.parent.is_dir() and path.parts[0] in _OWNERS.values():
        directory = quote(f"models/{path.name}")
        return f"download it: hf download {quote(name)} --local-dir {directory}, and name that directory"
    owner = next((owner for family, owner in _OWNERS.items() if path.name.startswith(family)), None)
    if owner is None:
        return f"download a model, for example: {_download('OWNER', path)}"
    return f"download it: {_download(owner, path)}"


def _download(owner: str, path: Path) -> str:
    """Return the shell command that downloads the model ``path.name`` of ``owner`` into ``path``."""
    return f"hf download {quote(f'{owner}/{path.name}')} --local-dir {quote(str(path))}"
