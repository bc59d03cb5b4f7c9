"""Reads the ``config.yaml`` that a run left: its configuration, every default filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_resolved(path: Path, *sections: str) -> dict[str, Any]:
    """Return the configuration in a file, with these ``sections`` in it.

    Raises OSError when the file cannot be read, and ValueError, which names it, for one that no run wrote.
    """
    import yaml  # takes a while to load

    try:
        content = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path} is not the configuration of a run: {why}") from None
    config = content if isinstance(content, dict) else {}
    absent = [name for name in sections if not isinstance(config.get(name), dict)]
    if absent:
        raise ValueError(f"{path} is not the configuration of a run: it has no section {absent[0]}")
    return config
