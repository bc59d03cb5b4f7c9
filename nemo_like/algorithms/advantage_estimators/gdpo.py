"""GDPO normalises each reward component by itself (arXiv 2601.05242).

s = sum_k w_k (r_k - mean_group) / (std_group + 1e-6)      A = (s - mean(s)) / (std(s) + 1e-6)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from nemo_like.algorithms.advantages import group_relative_advantages
from nemo_like.algorithms.estimator_kind import EstimatorKind
from nemo_like.algorithms.estimators import AdvantageInputs
from nemo_like.algorithms.options import GRPOConfig
from nemo_like.config.problems import Problem


def gdpo(inputs: AdvantageInputs, cfg: GRPOConfig) -> list[float]:
    """Compute ``normalized_sum`` with the weights in ``grpo.adv_estimator.reward_weights``."""
    return normalized_sum(inputs, cfg.adv_estimator.reward_weights)


def normalized_sum(inputs: AdvantageInputs, weights: Mapping[str, float]) -> list[float]:
    """Normalise each reward component in its group, and their weighted sum over the batch.

    ``A = (s - mean(s)) / (std(s) + 1e-6)`` with ``s = sum_k w_k (r_k - mean_group) / (std_group + 1e-6)``;
    both std are unbiased (arXiv 2601.05242). A component that is uniform in a group adds nothing there. For
    a sample on which a component abstains (NaN), it adds nothing, and its statistics leave the sample out.

    Raises ValueError when the inputs lack a component that has a weight.
    """
    absent = sorted(weights.keys() - inputs.components.keys())
    if absent:
        raise ValueError(
            f"grpo.adv_estimator.reward_weights names {', '.join(absent)}, which the samples do not have; "
            f"they have {', '.join(sorted(inputs.components)) or 'no components'}"
        )
    sums = [0.0] * len(inputs.rewards)
    for name, weight in weights.items():
        component = inputs.components[name]
        judges = [
            kept * (not math.isnan(value)) for kept, value in zip(inputs.sample_mask, component, strict=True)
        ]
        normalized = group_relative_advantages(
            component,
            inputs.group_ids,
            normalize_rewards=True,
            use_leave_one_out_baseline=False,
            sample_mask=judges,
        )
        sums = [total + weight * value for total, value in zip(sums, normalized, strict=True)]
    return group_relative_advantages(
        sums,
        ["the whole batch"] * len(sums),
        normalize_rewards=True,
        use_leave_one_out_baseline=False,
        sample_mask=inputs.sample_mask,
    )


def _problems(grpo: GRPOConfig) -> Iterator[Problem]:
    weights = grpo.adv_estimator.reward_weights
    if not any(weights.values()):
        yield Problem(
            key=f"grpo.adv_estimator.reward_weights={weights}",
            rule="must weigh at least one reward component with the estimator gdpo",
            remedy="for example ++grpo.adv_estimator.reward_weights.correct=1.0",
        )
    for stage in ("reward_scaling", "reward_shaping"):
        if getattr(grpo, stage).enabled:
            yield Problem(
                key=f"grpo.{stage}.enabled=true",
                rule="would do nothing with the estimator gdpo, which sees raw components, not their sum",
                remedy="switch it off, or let the environment give such a penalty as a component",
            )


KIND = EstimatorKind(
    about="GDPO: each reward component normalised by itself (arXiv 2601.05242)",
    function="nemo_like.algorithms.advantage_estimators.gdpo:gdpo",
    reference="nemo_like.tripwires.reference_advantages:weighted_components",
    problems=_problems,
    weighs_components=True,
)
