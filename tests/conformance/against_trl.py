"""Asks TRL: ``GRPOTrainer._compute_loss``, as its trainer calls it, on a trainer without a model.

Its trainer accumulates what that returns over micro-batches, and accelerate averages gradients over ranks.
TRL computes importance weights inside of its rollout, where they cannot be called; ``_weights`` is that
arithmetic. It has no mask of samples but that of truncated ones, whose completion mask it sets to 0.
"""

from __future__ import annotations

from collections import defaultdict
from importlib.metadata import version as version_of
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.conformance.adapters import OF_TOKENS, Absent, Asked, Padded, is_of_tokens

NAME = "TRL"
REMARK = (
    "TRL computes importance weights inside of its rollout, where they cannot be called: the adapter "
    "computes them as TRL does, so what is said of these weights holds for that arithmetic."
)
SPLITS = ("whole", "one by one", "even")  # its micro-batches are all of one size
ESTIMATORS: dict[str, tuple[str, ...]] = {}  # advantages are computed inside of its rollout
_MEANS = {"token": "dapo", "sample": "grpo", "constant": "dr_grpo"}
_MODES = {
    "plain": "token_truncate",
    "tis": "token_truncate",
    "icepop": "token_mask",
    "seq_mask": "sequence_mask",
}


def version() -> str:
    """Return the installed version."""
    return version_of("trl")


def plan(case: dict[str, Any]) -> list[Asked] | Absent:
    """Return the keys that mean a case, and the conventions that then apply, or why there are none."""
    loss, mean = case["loss"], case["mean"]
    if absent := _absent(case):
        return Absent(absent)
    keys: dict[str, Any] = {"loss_type": loss if loss in ("cispo", "sapo") else _MEANS[mean]}
    does = ["masked_count"] if mean != "token" else []
    if loss != "on_policy":
        does.append("no_ratio_limit")
    if loss == "gspo":
        keys["importance_sampling_level"] = "sequence"
    if loss == "cispo":
        keys["epsilon_high"] = 1 + case["clip_high"]
        does.append("upper_bound_only")
    if case["dual_clip"]:
        keys["delta"] = case["dual_clip"]
    if correction := case["correction"]:
        mode = _MODES[correction["type"]]
        if loss == "gspo":
            mode = mode.replace("token", "sequence")
        keys["vllm_importance_sampling_mode"] = mode
        does.append("weight_no_limit")
        if correction["type"] == "seq_mask":
            does.append("weight_by_sample")
    if case["kl"]:
        keys["use_bias_correction_kl"] = True
        does += ["kl_by_ratio", "kl_no_limit"]
    if case["entropy"]:
        does.append("entropy_by_tokens")
    asked = [Asked(case, keys, tuple(does))]
    if keys["loss_type"] == "dapo" and not case["entropy"]:
        asked.append(Asked(case, {**keys, "loss_type": "bnpo"}, (*does, "micro_batch_mean")))
    if case["kl"]:
        path = tuple("kl_path" if name == "kl_by_ratio" else name for name in does)
        asked.append(Asked(case, {**keys, "use_bias_correction_kl": False}, path))
    return asked


def _absent(case: dict[str, Any]) -> str | None:
    loss, mean = case["loss"], case["mean"]
    if is_of_tokens(case):
        return OF_TOKENS
    if loss in ("reinforce", "gspo_token", "engine_ratio"):
        return {
            "reinforce": "there is no loss without a ratio",
            "gspo_token": "sequence-level ratios have GSPO's gradient",
            "engine_ratio": "the ratio is to the trainer's log-probs",
        }[loss]
    if loss == "cispo" and mean != "token":
        return "loss_type=cispo has the token-level mean"
    if loss == "sapo" and mean != "sample":
        return "loss_type=sapo has the mean per sample"
    if case.get("off_policy_mask"):
        return "its off-policy mask was not asked for"
    if case["kl"] and case["kl"].get("weighed"):
        return "the KL is weighed by the ratio to the trainer alone"
    if case["kl"] and case["kl"]["kind"] != "k3":
        return "the KL is estimated by k3"
    return None


def micro_batch_loss(padded: Padded, asked: Asked) -> Tensor:
    """Return what the trainer back-propagates for one micro-batch."""
    from trl import GRPOTrainer

    case = asked.case
    prev = padded.logprobs.detach() if case["loss"] == "on_policy" else padded.columns["prev"]
    inputs = {
        "prompt_ids": torch.zeros(len(prev), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(prev), 1, dtype=torch.int64),
        "completion_ids": torch.zeros(prev.shape, dtype=torch.int64),
        # What the environment said between the turns is in the completion, and out of the tool mask. A
        # sample that does not train has a completion mask of 0.
        "completion_mask": padded.is_token * (padded.mask.sum(1, keepdim=True) > 0),
        "tool_mask": padded.generated,
        "advantages": padded.columns["advantage"],
        "old_per_token_logps": prev,
        "ref_per_token_logps": padded.columns["reference"],
        "num_items_in_batch": padded.whole["mask"].sum(),
    }
    if case["correction"]:
        inputs["importance_sampling_ratio"] = _weights(padded, prev, asked)
    trainer = _trainer(padded, asked)
    return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)


def _trainer(padded: Padded, asked: Asked) -> SimpleNamespace:
    """Return what ``_compute_loss`` reads of its trainer, as the values of GRPOConfig set it."""
    case, keys = asked.case, asked.keys
    args = SimpleNamespace(
        delta=keys.get("delta"),
        use_bias_correction_kl=keys.get("use_bias_correction_kl", False),
        sapo_temperature_pos=case["tau_pos"],
        sapo_temperature_neg=case["tau_neg"],
        steps_per_generation=padded.num_micro_batches,
    )
    accelerator = SimpleNamespace(
        num_processes=padded.num_ranks,
        gather=lambda values: values,
        reduce=lambda values, reduction: values,
        sync_gradients=True,
    )
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (padded.logprobs, padded.entropies, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=keys.get("importance_sampling_level", "token"),
        beta=(case["kl"] or {}).get("beta", 0.0),
        loss_type=keys["loss_type"],
        epsilon_low=case["clip_low"],
        epsilon_high=keys.get("epsilon_high", case["clip_high"]),
        max_completion_length=case["constant"],
        current_gradient_accumulation_steps=padded.num_micro_batches,
        use_vllm=bool(case["correction"]),
        vllm_importance_sampling_correction=bool(case["correction"]),
        _entropy_bonus_enabled=bool(case["entropy"]),
        use_adaptive_entropy=False,
        entropy_coef=case["entropy"],
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        args=args,
        _metrics={"train": defaultdict(list)},
    )


def _weights(padded: Padded, prev: Tensor, asked: Asked) -> Tensor:
    """Return the importance weights that TRL's rollout would have handed to the loss."""
    correction, mode = asked.case["correction"], asked.keys["vllm_importance_sampling_mode"]
    difference = (prev - padded.columns["generation"]) * padded.mask
    if mode.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    weights = difference.exp()
    low, high = correction["low"], correction["high"]
    if mode.endswith("truncate"):
        return weights if low is None and high is None else weights.clamp(low, high)
    return weights.masked_fill((weights < low) | (weights > high), 0.0)
