"""Filters by name: which samples of a rollout train.

    rewards, shaped ──▶ grpo.sample_filters, in order ──▶ dynamic sampling ──▶ overlong filter ──▶ advantages

Standard library only: the driver calls filters on tags. A filter is any function of ``RolledOut`` and the
section ``grpo`` of the configuration to one bool per sample, true for samples that may train; the
configuration names the two of this file, or a user's own as "package.module:function". Dynamic sampling and
the overlong filter are these two at fixed places.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_like.algorithms.masking import mask_truncated
from nemo_like.algorithms.named_functions import FunctionRole, load_function
from nemo_like.algorithms.options import GRPOConfig
from nemo_like.algorithms.rewards import informative_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledOut:
    """What a filter decides by: whole groups of samples, in any order; every sequence has one entry per
    sample."""

    rewards: Sequence[float]  # as the environment gave them
    shaped_rewards: Sequence[float]  # after grpo.reward_scaling and grpo.reward_shaping
    group_ids: Sequence[Hashable]  # samples of one prompt share one
    sample_mask: Sequence[float]  # 0: its reward failed, or an earlier filter refused it
    num_response_tokens: Sequence[float]
    is_truncated: Sequence[bool]
    # By name, the tags that the filter is marked to read (batch.tags.reads_tags).
    tags: Mapping[str, Sequence[Any]] = field(default_factory=dict)


SampleFilter = Callable[[RolledOut], list[bool]]


def different_rewards(samples: RolledOut, cfg: GRPOConfig) -> list[bool]:
    """Keep the groups in which unmasked samples have different raw rewards (DAPO, arXiv 2503.14476)."""
    kept = set(informative_groups(samples.rewards, samples.group_ids, samples.sample_mask))
    return [group_id in kept for group_id in samples.group_ids]


def not_truncated(samples: RolledOut, cfg: GRPOConfig) -> list[bool]:
    """Keep the samples that did not run into a limit of tokens (DAPO's overlong filter, arXiv 2503.14476)."""
    return [bool(kept) for kept in mask_truncated(samples.sample_mask, samples.is_truncated).sample_mask]


def build_filter(name: str, cfg: GRPOConfig) -> SampleFilter:
    """Return the filter of this name, wrapped so that its result is checked.

    Raises ValueError when the name is neither known nor an import path that exists. The returned function
    raises ValueError when the filter does not give one bool per sample.
    """
    keep = load_function(FunctionRole.filter, name)

    def checked(samples: RolledOut) -> list[bool]:
        kept = keep(samples, cfg)
        if not isinstance(kept, Sequence) or len(kept) != len(samples.rewards):
            what = f"{len(kept)} values" if isinstance(kept, Sequence) else type(kept).__name__
            raise ValueError(
                f"the filter {name} gave {what} for {len(samples.rewards)} samples; it must give one bool "
                "per sample, true for those that may train"
            )
        for place, value in enumerate(kept):
            if value not in (True, False):
                raise ValueError(
                    f"the filter {name} gave {value!r} for sample {place} of group "
                    f"{samples.group_ids[place]}; it must give true or false"
                )
        return [bool(value) for value in kept]

    return checked
