"""The configuration that means the same as a case of the kit."""

from __future__ import annotations

from typing import Any

from nemo_like.algorithms.options import ImportanceSamplingType, KLType, LossConfig


def loss_config(case: dict[str, Any]) -> LossConfig:
    """Return the section ``loss_fn`` that means the same as a case of the kit."""
    kind, correction, kl = case["loss"], case["correction"] or {}, case["kl"] or {}
    bound = correction.get("type") if correction.get("type") != "plain" else None
    return LossConfig(
        kind=kind if kind in ("sapo", "gspo_token") else "policy_gradient",
        arguments={"tau_pos": case["tau_pos"], "tau_neg": case["tau_neg"]} if kind == "sapo" else {},
        ratio_clip_min=case["clip_low"],
        ratio_clip_max=case["clip_high"],
        ratio_clip_c=case["dual_clip"],
        disable_ppo_ratio=kind == "reinforce",
        use_cispo=kind == "cispo",
        sequence_level_importance_ratios=kind in ("gspo", "gspo_token"),
        force_on_policy_ratio=kind == "on_policy",
        use_generation_logprobs_as_prev=kind == "engine_ratio",
        token_level_loss=case["mean"] == "token",
        sequence_length_normalizer=case["constant"] if case["mean"] == "constant" else None,
        entropy_coef=case["entropy"] or None,
        use_importance_sampling_correction=bool(correction),
        truncated_importance_sampling_type=ImportanceSamplingType[bound] if bound else None,
        truncated_importance_sampling_ratio=correction.get("high"),
        truncated_importance_sampling_ratio_min=correction.get("low"),
        reference_policy_kl_penalty=kl.get("beta", 0.0),
        reference_policy_kl_type=KLType[kl.get("kind", "k3")],
        use_kl_in_reward=False,
    )
