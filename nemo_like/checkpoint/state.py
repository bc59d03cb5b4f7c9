"""What a checkpoint says of the run around the weights. Standard library only."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any

FORMAT_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingState:
    """Where a run stood after rollout step ``step``; enough, with the weights, to continue with the next."""

    step: int  # rollout steps done
    policy_version: int
    epoch: int  # of the training data, from 0
    consumed_samples: int  # responses generated for training, dropped ones included
    valid_tokens: int  # response tokens trained on
    sampler: dict[str, Any]  # the prompt order's own state
    metrics: dict[str, float]  # of that step, validation included: what "best" is judged by
    wandb_run_id: str | None

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TrainingState:
        """Raises ValueError for anything but a state of this format."""
        try:
            values = dict(json.loads(text))
        except (json.JSONDecodeError, TypeError, ValueError) as error:
            raise ValueError(f"not a JSON object: {error}") from None
        version = values.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version is {version!r}, this program writes and reads {FORMAT_VERSION}")
        expected = {field.name for field in fields(cls)}
        if values.keys() != expected:
            raise ValueError(f"keys are {sorted(values)}, expected {sorted(expected)}")
        return cls(**values)
