"""Python code that checkpoints bring, and modules that processes import before they build a model.

    policy.trust_remote_code, policy.external_lib
        ──▶ environment of each actor (driver.processes), of child processes and scripts (``allowing_code``)
        ──▶ ``loading_arguments``, wherever a configuration, a tokenizer or a model is loaded

The environment carries both keys, since it also reaches the workers that vLLM starts.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_like.config.problems import Problem
from nemo_like.policy.options import PolicyConfig

_TRUST, _LIBRARIES = "NEMO_LIKE_TRUST_REMOTE_CODE", "NEMO_LIKE_EXTERNAL_LIB"
# transformers copies a checkpoint's Python files into this directory, and imports them from there.
_COPIES = "HF_MODULES_CACHE"


def code_environment(policy: PolicyConfig, copies: Path | None = None) -> dict[str, str]:
    """Return the environment variables of a process that loads models of the run; none by default.

    The process copies checkpoints' code into the directory ``copies``. Processes that share one might read a
    file that another is about to write.
    """
    found = {_LIBRARIES: ",".join(policy.external_lib)} if policy.external_lib else {}
    if policy.trust_remote_code:
        found[_TRUST] = "1"
        if copies is not None:
            found[_COPIES] = str(copies.absolute())
    return found


@contextmanager
def allowing_code(policy: PolicyConfig) -> Iterator[None]:
    """Have this process, and children that the block starts, load models as the processes of the run do."""
    before = {name: os.environ.pop(name, None) for name in (_TRUST, _LIBRARIES)}
    os.environ.update(code_environment(policy))
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def import_external_libs() -> None:
    """Import the modules of ``policy.external_lib``. Raises the errors of these imports."""
    for name in filter(None, os.environ.get(_LIBRARIES, "").split(",")):
        importlib.import_module(name)


def loading_arguments() -> dict[str, Any]:
    """Import the modules of ``policy.external_lib``, and return the arguments with which transformers and
    vLLM then load a configuration, a tokenizer or a model."""
    import_external_libs()
    return {"trust_remote_code": True} if os.environ.get(_TRUST) else {}


def brings_code(checkpoint: Path) -> bool:
    """Return whether the configuration of a checkpoint's model or tokenizer names Python code of its own."""
    return any(_names_code(checkpoint / name) for name in ("config.json", "tokenizer_config.json"))


def _names_code(file: Path) -> bool:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # another rule reports it
        return False
    return isinstance(content, dict) and bool(content.get("auto_map"))


def needs_trust(error: Exception) -> bool:
    """Return whether transformers refused to load a checkpoint since its code may not run."""
    return "trust_remote_code" in str(error)


def untrusted(key: str, checkpoint: str) -> Problem:
    """Return the problem of ``key``, whose value is a checkpoint, which needs code that may not run."""
    return Problem(
        key=f"{key}={checkpoint}",
        rule="needs Python code of its own (auto_map), and policy.trust_remote_code=false runs none",
        remedy="read its Python files, and set policy.trust_remote_code=true if you trust them",
    )
