"""Reads the sizes of the models that the worker groups of a run hold."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_like.configuration import Config
from nemo_like.models.model_info import ModelInfo, model_of
from nemo_like.plan.roles import Role, worker_groups

# By the role of the workers that hold them. The policy's model is always there, since engines hold it too.
RunModels = Mapping[Role, ModelInfo]


def run_models(cfg: Config) -> RunModels:
    """Return the sizes of the models of a run's worker groups, by role.

    Raises ConfigError for a model that is not on this machine and has no shipped sizes.
    """
    groups = {Role.policy_worker: cfg.policy, **worker_groups(cfg)}
    return {role: model_of(group) for role, group in groups.items()}
