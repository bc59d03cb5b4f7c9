"""DAPO's overlong filter: samples that did not run into a limit of tokens."""

from __future__ import annotations

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.algorithms.sample_filters import FilterKind, RolledOut, mask_truncated


def not_truncated(samples: RolledOut, cfg: GRPOConfig) -> list[bool]:
    """Keep the samples that did not run into a limit of tokens (DAPO's overlong filter, arXiv 2503.14476)."""
    return [bool(kept) for kept in mask_truncated(samples.sample_mask, samples.is_truncated).sample_mask]


KIND = FilterKind(
    about="DAPO's overlong filter: samples that did not run into a limit of tokens (arXiv 2503.14476)",
    function="nemo_like.algorithms.filter_kinds.not_truncated:not_truncated",
)
