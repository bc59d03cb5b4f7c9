"""Which samples must not train. Standard library only; the driver calls this on tags."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MaskedSamples:
    """``sample_mask[i]`` is 0 for a sample that must not train."""

    sample_mask: tuple[float, ...]
    num_masked: int  # how many were switched from training to not training


def mask_logprob_mismatch(
    sample_mask: Sequence[float], mult_prob_error: Sequence[float], threshold: float | None
) -> MaskedSamples:
    """Mask the samples on which trainer and generation engine disagree too much.

    ``mult_prob_error[i]`` is sample i's mean over response tokens of exp|generation - prev log-prob|,
    1 where both agree. Samples above ``threshold`` are masked, and so are those whose error is not a
    number. ``None`` masks nothing.

    Raises ValueError when the sequences differ in length.
    """
    if len(sample_mask) != len(mult_prob_error):
        raise ValueError(
            f"{len(sample_mask)} sample mask entries but {len(mult_prob_error)} log-prob errors: "
            "there must be one of each per sample"
        )
    if threshold is None:
        return MaskedSamples(tuple(sample_mask), 0)
    masked = tuple(
        kept if error <= threshold else 0.0 for kept, error in zip(sample_mask, mult_prob_error, strict=True)
    )
    return MaskedSamples(
        masked, sum(bool(old) and not new for old, new in zip(sample_mask, masked, strict=True))
    )
