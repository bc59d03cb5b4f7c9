"""The state of a run that a checkpoint holds besides the policy's weights. Standard library only."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Where a run stood after step ``step``; with the policy's files it is enough to continue the run."""

    step: int  # steps done
    policy_version: int
    epoch: int  # of the training data, from 0
    consumed_samples: int  # samples generated for training, including those that did not train
    valid_tokens: int  # response tokens trained on
    sampler: dict[str, Any]  # the state of the sampler that orders the prompts
    metrics: dict[str, float]  # of that step, validation included; the best checkpoints are chosen by one
    wandb_run_id: str | None
    # By section of the configuration, the name, size and digest of each source; None in older checkpoints.
    data: dict[str, list[dict[str, Any]]] | None = None

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainingState:
        """Read a state that ``to_json`` wrote. Raises ValueError for anything but a state of this format."""
        try:
            values = dict(json.loads(text))
        except (json.JSONDecodeError, TypeError, ValueError) as error:
            raise ValueError(f"not a JSON object: {error}") from None
        version = values.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version is {version!r}, this program writes and reads {FORMAT_VERSION}")
        expected = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if not needed <= values.keys() <= expected:
            raise ValueError(f"keys are {sorted(values)}, expected {sorted(expected)}")
        return cls(**values)
