"""``EstimatorKind``: the description of an advantage estimator; each module of ``advantage_estimators`` has
one as its ``KIND``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from nemo_like.algorithms.options import ESTIMATOR_KINDS, AdvantageConfig, GRPOConfig
from nemo_like.config.problems import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorKind:
    """A kind of advantage estimator.

    about: its name in the field, with its paper.
    function: import path of ``(inputs, cfg, **grpo.adv_estimator.arguments) -> Advantages``.
    reference: import path of ``(samples, cfg)``, which computes the advantages anew in another way.
    options: the class of ``grpo.adv_estimator``.
    problems: yields every key of ``grpo`` that the estimator does not go with.
    judges_in_groups: a response is judged against others of its group, which therefore has at least two.
    is_of_groups: the advantages of a group follow from that group alone.
    chooses_baseline: it reads ``grpo.use_leave_one_out_baseline``.
    whitens_tokens: returns may differ from token to token, as with a KL in the reward.
    weighs_components: it reads ``grpo.adv_estimator.reward_weights``.
    has_critic: it needs a critic, the group ``value``.
    """

    about: str
    function: str
    reference: str | None = None
    options: type = AdvantageConfig
    problems: Callable[[GRPOConfig], Iterator[Problem]] | None = None
    judges_in_groups: bool = True
    is_of_groups: bool = False
    chooses_baseline: bool = False
    whitens_tokens: bool = False
    weighs_components: bool = False
    has_critic: bool = False


@cache
def own_estimator(path: str) -> EstimatorKind:
    """Return the kind for a user's own function, with the defaults for all that is unknown of it."""
    return EstimatorKind(about="a function of your own", function=path)


def estimator_kind_of(grpo: GRPOConfig) -> EstimatorKind:
    """Return the kind of the configured estimator."""
    kind: EstimatorKind = ESTIMATOR_KINDS.load(grpo.adv_estimator.name)
    return kind
