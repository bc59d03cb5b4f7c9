"""Digests of what a rank saves in a checkpoint, beside it, to be compared after the checkpoint was loaded.

A rank of another layout holds other parts, so digests are compared only where the layout is the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from nemo_like.cluster.coordinates import Coordinates
from nemo_like.policy.loss.updated_tensors import UpdatedTensor
from nemo_like.tripwires.weight_digests import WeightsDigest

MOMENT = "moment "  # how the names of digests of an optimizer's state begin


def state_digests(weights: Sequence[tuple[str, Tensor]], updated: Sequence[UpdatedTensor]) -> dict[str, int]:
    """Return the digests of a rank's weights, and of its optimizer's state of each tensor, by name."""
    digest = WeightsDigest()
    digest.add_all((name.replace(" ", "_"), weight.detach()) for name, weight in weights)
    found = digest.by_name()
    for name in sorted({name for one in updated for name in one.state if name != "step"}):
        of_state = WeightsDigest()
        held = [(one.name.replace(" ", "_"), one.state[name]) for one in updated if name in one.state]
        of_state.add_all(held)
        found |= {f"{MOMENT}{name} of {tensor}": value for tensor, value in of_state.by_name().items()}
    return found


def write_digests(directory: Path, coordinates: Coordinates, digests: Mapping[str, int]) -> None:
    """Write a rank's digests into a checkpoint's directory."""
    content = {"layout": asdict(coordinates.layout), "digests": digests}
    _path(directory, coordinates).write_text(json.dumps(content), encoding="utf-8")


def read_digests(directory: Path, coordinates: Coordinates) -> dict[str, int] | None:
    """Return the digests that the same rank of the same layout wrote; None where there are none."""
    path = _path(directory, coordinates)
    if not path.is_file():
        return None
    content = json.loads(path.read_text(encoding="utf-8"))
    if content["layout"] != asdict(coordinates.layout):
        return None
    return {name: int(value) for name, value in content["digests"].items()}


def _path(directory: Path, coordinates: Coordinates) -> Path:
    return directory / f"digests_{coordinates.rank}_of_{coordinates.layout.world_size}.json"
