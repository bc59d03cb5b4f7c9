"""Functions that a configuration names: shipped ones by a short name, a user's own by "package.module:name".

    loss         loss_fn.kind               (tokens, cfg, **loss_fn.arguments)               -> LossTerms
    estimator    grpo.adv_estimator.name    (inputs, cfg, **grpo.adv_estimator.arguments)    -> Advantages
    filter       grpo.sample_filters        (samples, cfg)                                   -> list[bool]

``cfg`` is the section ``loss_fn`` or ``grpo``. Shipped functions are imported and called exactly as a user's
own are. Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from enum import Enum
from typing import Any

from nemo_like.algorithms.options import AdvantageEstimatorName
from nemo_like.config.import_path import load_by_path
from nemo_like.config.problems import Problem


class FunctionRole(Enum):
    """What a named function is for."""

    loss = "loss"
    estimator = "estimator"
    filter = "filter"


SHIPPED: Mapping[FunctionRole, Mapping[str, str]] = {
    FunctionRole.loss: {
        "policy_gradient": "nemo_like.algorithms.losses:policy_loss",
        "sapo": "nemo_like.algorithms.sapo:sapo",
        "gspo_token": "nemo_like.algorithms.gspo_token:gspo_token",
        "distillation": "nemo_like.policy.distillation_loss:distillation",
    },
    FunctionRole.estimator: {
        name: f"nemo_like.algorithms.advantage_estimators.{name}:{name}"
        for name in AdvantageEstimatorName.__members__
    },
    FunctionRole.filter: {
        "different_rewards": "nemo_like.algorithms.sample_filters:different_rewards",
        "not_truncated": "nemo_like.algorithms.sample_filters:not_truncated",
    },
}


def is_own_function(name: str) -> bool:
    """Return whether ``name`` is the import path of a user's own function."""
    return ":" in name


def load_function(role: FunctionRole, name: str) -> Any:
    """Import and return the function that a configuration names.

    Raises ValueError when it is neither shipped nor an import path that exists.
    """
    path = SHIPPED[role].get(name, name)
    if not is_own_function(path):
        raise ValueError(f"the {role.value} {name!r} {_rule(role)}")
    return load_by_path(path)


def unknown_function(role: FunctionRole, key: str, name: str) -> Problem | None:
    """Return the problem of a name that is neither shipped nor an import path; None where there is none."""
    if is_own_function(name) or name in SHIPPED[role]:
        return None
    close = get_close_matches(name, SHIPPED[role], n=1, cutoff=0.5)
    return Problem(key=f"{key}={name}", rule=_rule(role), remedy=f"did you mean {close[0]}?" if close else "")


def _rule(role: FunctionRole) -> str:
    return f"must be one of {', '.join(SHIPPED[role])}, or your own {role.value}, package.module:function"
