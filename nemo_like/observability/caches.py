"""Says where a user's runs keep files, such as compiled code, that make the next run start sooner."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def cache_directory() -> Path:
    """Make and return ``nemo_like`` in the user's cache directory.

    Without a home directory that can be written, return a directory below the temporary files, which go with
    the run.
    """
    own = _in_home("XDG_CACHE_HOME", ".cache") / "nemo_like"
    return own if _is_usable(own) else Path(tempfile.gettempdir(), "nemo_like-cache")


def matplotlib_directory() -> dict[str, str]:
    """Return the environment variable that gives Matplotlib a directory for its files; empty when it has one
    already.

    Without a directory Matplotlib makes one below the temporary files, says so, and fails at the end of the
    process to remove it, since it went with the run.
    """
    if "MPLCONFIGDIR" in os.environ or _is_usable(_in_home("XDG_CONFIG_HOME", ".config") / "matplotlib"):
        return {}
    return {"MPLCONFIGDIR": str(cache_directory() / "matplotlib")}


def _in_home(variable: str, name: str) -> Path:
    """Return the directory that the environment variable names, or else ``name`` in the user's home.

    It is a relative path when the user has no known home.
    """
    return Path(os.environ.get(variable) or os.path.join(os.path.expanduser("~"), name))


def _is_usable(path: Path) -> bool:
    """Make the directory if it is missing; return whether this user can write into it."""
    with suppress(OSError):
        if path.is_absolute():
            path.mkdir(parents=True, exist_ok=True)
            return os.access(path, os.W_OK | os.X_OK)
    return False


def inductor_cache() -> dict[str, str]:
    """Return the environment variable that says where PyTorch's compiler keeps its files.

    By itself PyTorch makes a directory below the temporary files at its import, and leaves it there.
    """
    return {INDUCTOR: os.environ.get(INDUCTOR, str(cache_directory() / "inductor"))}
