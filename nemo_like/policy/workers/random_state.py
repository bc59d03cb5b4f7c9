"""Saves a worker's random generators in checkpoints, so that a resumed run draws the dropout that was due
next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def save_random_state(path: Path, device: torch.device, own: Mapping[str, Tensor]) -> None:
    """Write the states of torch's generators on the CPU and on ``device``, and ``own``, the states of the
    backend's own generators."""
    state: dict[str, Any] = {"device": device.type, "cpu": torch.get_rng_state(), "own": dict(own)}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    torch.save(state, path)


def load_random_state(path: Path, device: torch.device) -> dict[str, Tensor]:
    """Restore torch's generators from a file, and return the saved states of the backend's own generators.

    States of generators on another kind of device are left out, since they cannot be continued here. Older
    files hold the CPU's state alone.
    """
    state = torch.load(path, map_location="cpu")
    if isinstance(state, Tensor):
        torch.set_rng_state(state)
        return {}
    torch.set_rng_state(state["cpu"])
    if state["device"] != device.type:
        return {}
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
    own: dict[str, Tensor] = state["own"]
    return own
