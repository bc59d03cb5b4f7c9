"""Masks for samples that must not train. Standard library only; the driver calls this on tags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MaskedSamples:
    """A new sample mask: ``sample_mask[i]`` is 0 when sample i must not train."""

    sample_mask: tuple[float, ...]
    num_masked: int  # how many samples the old mask kept and this mask does not


def mask_logprob_mismatch(
    sample_mask: Sequence[float], mult_prob_error: Sequence[float], threshold: float | None
) -> MaskedSamples:
    """Mask the samples on which trainer and generation engine disagree too much.

    ``mult_prob_error[i]`` is sample i's mean over response tokens of exp|generation - prev log-prob|,
    1 where both agree. Samples whose error is above ``threshold`` or NaN are masked; a ``threshold`` of
    None masks nothing.

    Raises ValueError when the sequences differ in length.
    """
    if len(sample_mask) != len(mult_prob_error):
        raise ValueError(
            f"{len(sample_mask)} sample mask entries but {len(mult_prob_error)} log-prob errors: "
            "there must be one of each per sample"
        )
    if threshold is None:
        return MaskedSamples(tuple(sample_mask), 0)
    return _masked_where(sample_mask, [not error <= threshold for error in mult_prob_error])


def mask_truncated(sample_mask: Sequence[float], is_truncated: Sequence[float]) -> MaskedSamples:
    """Mask the samples whose response ran into a token limit: the overlong filter (arXiv 2503.14476)."""
    return _masked_where(sample_mask, is_truncated)


def _masked_where(sample_mask: Sequence[float], is_out: Sequence[float]) -> MaskedSamples:
    masked = tuple(0.0 if out else kept for kept, out in zip(sample_mask, is_out, strict=True))
    return MaskedSamples(
        masked, sum(bool(old) and not new for old, new in zip(sample_mask, masked, strict=True))
    )
