"""A plain clipped loss and hand-made tokens, for tests of losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nemo_like.algorithms.losses import LossTokens
from nemo_like.algorithms.options import KLType, LossConfig

CONFIG = LossConfig(
    kind="policy_gradient",
    arguments={},
    ratio_clip_min=0.2,
    ratio_clip_max=0.28,
    ratio_clip_c=None,
    disable_ppo_ratio=False,
    use_cispo=False,
    sequence_level_importance_ratios=False,
    force_on_policy_ratio=False,
    use_generation_logprobs_as_prev=False,
    token_level_loss=True,
    sequence_length_normalizer=None,
    reference_policy_kl_penalty=0.0,
    reference_policy_kl_type=KLType.k3,
    use_kl_in_reward=False,
    entropy_coef=None,
    use_importance_sampling_correction=False,
    truncated_importance_sampling_type=None,
    truncated_importance_sampling_ratio=None,
    truncated_importance_sampling_ratio_min=None,
)


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
