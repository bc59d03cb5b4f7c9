"""Decides which samples of a rollout train: by filters that are named, and by masks.

    rewards, shaped ──▶ grpo.sample_filters, in order ──▶ dynamic sampling ──▶ overlong filter ──▶ advantages

Standard library only: the driver calls filters on tags. A filter is any function of ``RolledOut`` and the
section ``grpo`` of the configuration to one bool per sample, true for samples that may train; the
configuration names filters of ``filter_kinds``, or a user's own as "package.module:function". Dynamic
sampling and the overlong filter apply the two shipped filters at fixed points. ``mask_logprob_mismatch``
masks samples on which trainer and engine disagree, once the trainer has scored them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from nemo_like.algorithms.options import FILTER_KINDS, GRPOConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """The input of a filter: whole groups of samples, in any order. Every sequence has one entry per
    sample."""

    rewards: Sequence[float]  # as the environment gave them
    shaped_rewards: Sequence[float]  # after grpo.reward_scaling and grpo.reward_shaping
    group_ids: Sequence[Hashable]  # samples of one prompt share one
    sample_mask: Sequence[float]  # 0: its reward failed, or an earlier filter refused it
    num_response_tokens: Sequence[float]
    is_truncated: Sequence[bool]
    # Values by name of the tags that the filter is marked to read (batch.tags.reads_tags).
    tags: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterKind:
    """A kind of filter. about: which samples it keeps. function: path of ``(samples, cfg) -> list[bool]``."""

    about: str
    function: str


@cache
def own_filter(path: str) -> FilterKind:
    """Return the kind for a user's own function."""
    return FilterKind(about="a function of your own", function=path)


SampleFilter = Callable[[RolledOut], list[bool]]


def build_filter(name: str, cfg: GRPOConfig) -> SampleFilter:
    """Return the filter of this name, wrapped so that its result is checked.

    Raises ValueError when the name is neither known nor an import path that exists. The returned function
    raises ValueError when the filter does not give one bool per sample.
    """
    keep = FILTER_KINDS.function(name)

    def checked(samples: RolledOut) -> list[bool]:
        kept = keep(samples, cfg)
        if not isinstance(kept, Sequence) or len(kept) != len(samples.rewards):
            what = f"{len(kept)} values" if isinstance(kept, Sequence) else type(kept).__name__
            raise ValueError(
                f"the filter {name} gave {what} for {len(samples.rewards)} samples; it must give one bool "
                "per sample, true for those that may train"
            )
        for i, value in enumerate(kept):
            if value not in (True, False):
                raise ValueError(
                    f"the filter {name} gave {value!r} for sample {i} of group "
                    f"{samples.group_ids[i]}; it must give true or false"
                )
        return [bool(value) for value in kept]

    return checked


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
