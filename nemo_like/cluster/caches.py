"""Where runs of a user keep what makes the next one start sooner, such as compiled code."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def cache_directory() -> Path:
    """Return ``nemo_like`` in the user's directory of caches, which is made.

    Where the user has no home that can be written, it is a directory among the temporary files, which goes
    with the run.
    """
    home = os.path.expanduser("~")  # "~" where nobody knows of one
    own = Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache", "nemo_like")
    if own.is_absolute():
        with suppress(OSError):
            own.mkdir(parents=True, exist_ok=True)
            if os.access(own, os.W_OK | os.X_OK):
                return own
    return Path(tempfile.gettempdir(), "nemo_like-cache")


def inductor_cache() -> dict[str, str]:
    """Return the variable that says where PyTorch's compiler keeps its files. By itself it makes a directory
    among the temporary files as soon as it is imported, and leaves it there."""
    return {INDUCTOR: os.environ.get(INDUCTOR, str(cache_directory() / "inductor"))}
