"""A plain clipped loss and hand-made tokens, for tests of losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_like.algorithms.losses import LossTokens
from nemo_like.algorithms.options import LossConfig
from tests.losses import loss_of

CLIP_HIGHER = {"ratio_clip_min": 0.2, "ratio_clip_max": 0.28}


def of_kind(
    kind: str = "policy_gradient", own: Mapping[str, Any] | None = None, **changes: Any
) -> LossConfig:
    """The loss of a kind, with clip-higher and the values ``own`` where it has such keys, and with changes by
    field name."""
    return replace(loss_of(kind, {**CLIP_HIGHER, **(own or {})}), **changes)


CONFIG = of_kind()
GSPO = of_kind("gspo", token_level_loss=False)


def tokens(
    ratios: list[float], advantages: list[float], *, lengths: list[int] | None = None, **changes: Any
) -> LossTokens:
    """Tokens whose probability ratios to the previous policy are these, each of weight 1.

    ``lengths`` are those of their samples; without, every token is a sample of its own.
    """
    lengths = lengths or [1] * len(ratios)
    ones = torch.ones(len(ratios))
    fields: dict[str, Any] = {
        "logprobs": torch.tensor(ratios).log().requires_grad_(),
        "prev_logprobs": torch.zeros(len(ratios)),
        "advantages": torch.tensor(advantages),
        "weights": ones,
        "mask": ones,
        "sample_index": sample_index(lengths),
        "response_lengths": torch.tensor(lengths, dtype=torch.float32),
    }
    return LossTokens(**(fields | changes))


def sample_index(lengths: list[int]) -> Tensor:
    """Which sample each token belongs to, [sum of lengths] int64."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
