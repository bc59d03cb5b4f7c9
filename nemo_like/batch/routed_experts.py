"""The column with the experts that an engine's routers chose, which the policy's routers then choose too.

Rollout routing replay (arXiv 2510.11370): engine and trainer round differently, so a router may choose
another expert in the trainer for the same token, and the log-probs then differ by far more than rounding.
"""

from __future__ import annotations

from pathlib import Path

from nemo_like.batch.columns import Column, Layout
from nemo_like.batch.recordings import ROUTED_EXPERTS
from nemo_like.models.model_info import ModelInfo, planned_shape, read_model_info
from nemo_like.policy.options import PolicyConfig

_MOST_IN_UINT8 = 255


def routed_experts_column(model: ModelInfo) -> Column:
    """Return the column of a mixture: [T, layers with experts, k], the k experts of each token in each layer.

    Experts are numbered from 1. A token has 0 where no engine chose experts for it:
    the last token of a sample, which never entered a model, and all tokens of a sample without a response.
    """
    num_experts = model.num_experts or 0
    return Column(
        ROUTED_EXPERTS,
        "uint8" if num_experts <= _MOST_IN_UINT8 else "int16",
        Layout.per_token,
        "the experts that the engine chose for the token, by layer, numbered from 1; 0 where it chose none",
        inner_shape=(model.num_mixture_layers, model.num_experts_per_token),
    )


def replayed_columns(policy: PolicyConfig) -> tuple[Column, ...]:
    """Return the column of experts with ``policy.megatron_cfg.router_replay``; () without.

    Raises ConfigError when the checkpoint's config.json cannot be read.
    """
    if not policy.megatron_cfg.router_replay:
        return ()
    # A plan for another machine knows a model by its shipped sizes.
    path = Path(policy.model_name)
    directory = path if path.is_dir() else planned_shape(policy.model_name) or path
    return (routed_experts_column(read_model_info(str(directory), policy.backend)),)
