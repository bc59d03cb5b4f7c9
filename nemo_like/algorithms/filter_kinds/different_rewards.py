"""DAPO's dynamic sampling: groups whose samples were rewarded differently."""

from __future__ import annotations

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.algorithms.rewards import informative_groups
from nemo_like.algorithms.sample_filters import FilterKind, RolledOut


def different_rewards(samples: RolledOut, cfg: GRPOConfig) -> list[bool]:
    """Keep the groups in which unmasked samples have different raw rewards (DAPO, arXiv 2503.14476)."""
    kept = set(informative_groups(samples.rewards, samples.group_ids, samples.sample_mask))
    return [group_id in kept for group_id in samples.group_ids]


KIND = FilterKind(
    about="DAPO's dynamic sampling: groups whose samples were rewarded differently (arXiv 2503.14476)",
    function="nemo_like.algorithms.filter_kinds.different_rewards:different_rewards",
)
