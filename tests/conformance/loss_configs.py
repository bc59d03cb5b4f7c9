"""The configuration that means the same as a case of the kit."""

from __future__ import annotations

from typing import Any

from nemo_like.algorithms.options import LossConfig
from tests.losses import loss_of

# Cases whose loss is another kind here, by a key of its own.
_BY_KEY = ("on_policy", "engine_ratio")
_PENALTIES = ("invalid_tool_call_advantage", "malformed_thinking_advantage")


def loss_config(case: dict[str, Any]) -> LossConfig:
    """Return the section ``loss_fn`` that means the same as a case of the kit."""
    name, correction, kl = case["loss"], case["correction"] or {}, case["kl"] or {}
    own = {
        "ratio_clip_min": case["clip_low"],
        "ratio_clip_max": case["clip_high"],
        "ratio_clip_c": case["dual_clip"],
        "tau_pos": case.get("tau_pos"),
        "tau_neg": case.get("tau_neg"),
    }
    penalties = dict(zip(_PENALTIES, case.get("penalties", ()), strict=False))
    bound = correction.get("type") if correction.get("type") != "plain" else None
    return loss_of(
        "policy_gradient" if name in ("ppo", *_BY_KEY) else name,
        own,
        force_on_policy_ratio=name == "on_policy",
        use_generation_logprobs_as_prev=name == "engine_ratio",
        token_level_loss=case["mean"] == "token",
        sequence_length_normalizer=case["constant"] if case["mean"] == "constant" else None,
        entropy_coef=0.0 if case.get("is_moving") else case["entropy"] or None,
        entropy_target=1.0 if case.get("is_moving") else None,
        use_importance_sampling_correction=bool(correction),
        truncated_importance_sampling_type=bound or None,
        truncated_importance_sampling_ratio=correction.get("high"),
        truncated_importance_sampling_ratio_min=correction.get("low"),
        reference_policy_kl_penalty=kl.get("beta", 0.0),
        reference_policy_kl_type=kl.get("kind", "k3"),
        use_on_policy_kl_approximation=kl.get("weighed", False),
        use_kl_in_reward=kl.get("in_reward", False),
        off_policy_mask_threshold=case.get("off_policy_mask"),
        top_entropy_quantile=case.get("top_entropy", 1.0),
        positive_example_nll_weight=case.get("likelihood", 0.0),
        **penalties,
    )
