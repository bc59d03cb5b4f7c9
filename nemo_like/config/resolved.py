"""Reads the ``config.yaml`` that a run left: its configuration with every default filled in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_like.config.resolvers import register_resolvers


def read_resolved(path: Path, *sections: str) -> dict[str, Any]:
    """Return the configuration in a file, which must have the groups ``sections``.

    The run wrote interpolations instead of texts that came from the environment. In ``sections`` these are
    resolved; elsewhere they stay. Raises OSError when the file cannot be read, and ValueError, which names
    the file, when no run wrote it or when ``sections`` need an environment variable that is not set.
    """
    import yaml  # takes a while to load
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        content = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path} is not the configuration of a run: {why}") from None
    config = content if isinstance(content, dict) else {}
    absent = [name for name in sections if not isinstance(config.get(name), dict)]
    if absent:
        raise ValueError(f"{path} is not the configuration of a run: it has no section {absent[0]}")
    register_resolvers()
    whole = OmegaConf.create(config)  # sections refer to each other
    try:
        resolved = {name: OmegaConf.to_container(whole[name], resolve=True) for name in sections}
    except OmegaConfBaseException as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"{path} asks for what is not set: {why}") from None
    return {**config, **resolved}
