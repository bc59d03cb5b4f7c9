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
    own = _in_home("XDG_CACHE_HOME", ".cache") / "nemo_like"
    return own if _is_usable(own) else Path(tempfile.gettempdir(), "nemo_like-cache")


def matplotlib_directory() -> dict[str, str]:
    """Return the variable that says where Matplotlib keeps its files, where it could not keep them by itself.

    It would make a directory among the temporary files, say so, and fail at the end of the process to remove
    what went with the run.
    """
    if "MPLCONFIGDIR" in os.environ or _is_usable(_in_home("XDG_CONFIG_HOME", ".config") / "matplotlib"):
        return {}
    return {"MPLCONFIGDIR": str(cache_directory() / "matplotlib")}


def _in_home(variable: str, name: str) -> Path:
    """Return the directory that a variable names, else the one of this name in the user's home: a relative
    path where nobody knows of a home."""
    return Path(os.environ.get(variable) or os.path.join(os.path.expanduser("~"), name))


def _is_usable(path: Path) -> bool:
    """Return whether there is such a directory that this user can write, or now is."""
    with suppress(OSError):
        if path.is_absolute():
            path.mkdir(parents=True, exist_ok=True)
            return os.access(path, os.W_OK | os.X_OK)
    return False


def inductor_cache() -> dict[str, str]:
    """Return the variable that says where PyTorch's compiler keeps its files. By itself it makes a directory
    among the temporary files as soon as it is imported, and leaves it there."""
    return {INDUCTOR: os.environ.get(INDUCTOR, str(cache_directory() / "inductor"))}
