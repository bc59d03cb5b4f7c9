"""Environment configurations for tests, from the shipped defaults of each kind."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from omegaconf import OmegaConf

from nemo_like.environments.options import EnvConfig
from tests.unit.config.checkpoints import REPOSITORY


def env_config(kind: str, **changes: Any) -> EnvConfig:
    """``configs/env/<kind>.yaml`` with some keys changed; ``options`` are merged."""
    folder = REPOSITORY / "configs" / "env"
    layers = [OmegaConf.to_container(OmegaConf.load(folder / f"{name}.yaml")) for name in ("default", kind)]
    names = {field.name for field in fields(EnvConfig)}
    kept = [{key: value for key, value in layer.items() if key in names} for layer in (*layers, changes)]
    typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(EnvConfig), *kept))
    assert isinstance(typed, EnvConfig)
    return typed
