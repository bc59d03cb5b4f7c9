"""Asks verl: ``verl.workers.utils.losses.ppo_loss``, as its engines call it per micro-batch.

Its engines count the response tokens of the mini-batch over all ranks, the trainer says how many samples the
mini-batch has, and FSDP averages gradients over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version as version_of
from typing import Any

import torch
from torch import Tensor

from tests.conformance.adapters import OF_TOKENS, Absent, Asked, Padded, is_of_tokens

NAME = "verl"
REMARK = ""
SPLITS = ("whole", "one by one", "even", "uneven", "two ranks", "four ranks")
_MEANS = {"token": "token-mean", "sample": "seq-mean-token-mean", "constant": "seq-mean-token-sum-norm"}
_MODES = {"gspo": "gspo", "gspo_token": "gspo", "cispo": "cispo", "reinforce": "gpg", "sapo": "sapo"}
_WITHOUT_BOUND = 1e9


def version() -> str:
    """Return the installed version."""
    return version_of("verl")


def plan(case: dict[str, Any]) -> list[Asked] | Absent:
    """Return the keys that mean a case, and the conventions that then apply, or why there are none."""
    if is_of_tokens(case):
        return Absent(OF_TOKENS)
    if case.get("off_policy_mask") or (case["kl"] and case["kl"].get("weighed")):
        return Absent("no key weighs the KL or leaves out a sample by its ratio to the engine in training")
    keys: dict[str, Any] = {
        "loss_mode": _MODES.get(case["loss"], "vanilla"),
        "loss_agg_mode": _MEANS[case["mean"]],
    }
    does: list[str] = []
    if case["mean"] != "token":
        does.append("masked_count")
    if case["loss"] == "ppo":
        keys["clip_ratio_c"] = case["dual_clip"] or _WITHOUT_BOUND
    if case["loss"] in ("on_policy", "engine_ratio"):
        keys["clip_ratio_c"] = _WITHOUT_BOUND
    if case["loss"] == "engine_ratio":
        keys["bypass_mode"] = True
    if case["loss"] in ("gspo", "gspo_token"):
        does.append("sample_ratio_to_10")
    if case["loss"] == "sapo" and case["mean"] != "sample":
        does += ["always_sample_mean", "masked_count"]
    if case["correction"]:
        _ask_for_correction(case, keys, does)
    if case["kl"]:
        keys["kl_loss_type"] = case["kl"]["kind"]
        does += ["kl_path", "kl_limit_k3_only"]
    return [Asked(case, keys, tuple(dict.fromkeys(does)))]


def _ask_for_correction(case: dict[str, Any], keys: dict[str, Any], does: list[str]) -> None:
    correction = case["correction"]
    is_sequence = case["loss"] in ("gspo", "gspo_token")
    keys["rollout_is"] = "sequence" if is_sequence else "token"
    keys["rollout_is_threshold"] = {
        "plain": _WITHOUT_BOUND,
        "tis": correction["high"],
        "icepop": f"{correction['low']}_{correction['high']}",
        "seq_mask": _WITHOUT_BOUND,
    }[correction["type"]]
    if is_sequence:
        does.append("weight_limit_once")
    if correction["type"] == "seq_mask":
        keys["rollout_rs"] = "seq_mean_k1"
        # Its k1 is the logarithm of the engine's over the trainer's probability, and the bounds are on that.
        keys["rollout_rs_threshold"] = f"{1 / correction['high']:.9g}_{1 / correction['low']:.9g}"
        does.append("rejected_leave")


def micro_batch_loss(padded: Padded, asked: Asked) -> Tensor:
    """Return what an engine back-propagates for one micro-batch."""
    import verl.workers.utils.losses as losses
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig

    case, keys = asked.case, asked.keys
    rows, width = list(padded.rows), padded.mask.shape[1]
    # The trainer corrects before it makes micro-batches, and the engine counts the tokens that are left.
    every_prev = _prev(padded.whole, asked)
    every_mask, every_weight = _corrected(padded.whole, every_prev, keys)
    prev, mask = every_prev[rows, :width], every_mask[rows, :width]
    weights = None if every_weight is None else every_weight[rows, :width]
    data = TensorDict(
        {
            "response_mask": mask,
            "old_log_probs": prev,
            "advantages": padded.columns["advantage"][:, None].expand_as(prev).clone(),
            "ref_log_prob": padded.columns["reference"],
            **({} if weights is None else {"rollout_is_weights": weights}),
        },
        batch_size=len(mask),
    )
    tensordict_utils.assign_non_tensor(
        data,
        dp_size=padded.num_ranks,
        batch_num_tokens=int(every_mask.sum()),
        global_batch_size=len(every_mask),
    )
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        use_dynamic_bsz=True,
        clip_ratio_low=case["clip_low"],
        clip_ratio_high=case["clip_high"],
        clip_ratio_c=keys.get("clip_ratio_c", 3.0),
        loss_agg_mode=keys["loss_agg_mode"],
        loss_scale_factor=case["constant"],
        tau_pos=case["tau_pos"],
        tau_neg=case["tau_neg"],
        entropy_coeff=case["entropy"],
        use_kl_loss=bool(case["kl"]),
        kl_loss_coef=(case["kl"] or {}).get("beta", 0.0),
        kl_loss_type=(case["kl"] or {}).get("kind", "k3"),
    )
    object.__setattr__(config.policy_loss, "loss_mode", keys["loss_mode"])
    # Scores come padded here; verl's models give them without padding.
    losses.no_padding_2_padding = lambda values, _: values
    scores = {"log_probs": padded.logprobs, **({"entropy": padded.entropies} if case["entropy"] else {})}
    loss, _ = losses.ppo_loss(config, scores, data)
    return loss


def _prev(values: Mapping[str, Tensor], asked: Asked) -> Tensor:
    """Return the log-probs that verl's ratio is taken to."""
    if asked.case["loss"] == "on_policy":
        return values["logprobs"].detach()
    return values["generation" if asked.case["loss"] == "engine_ratio" else "prev"]


def _corrected(
    values: Mapping[str, Tensor], prev: Tensor, keys: Mapping[str, Any]
) -> tuple[Tensor, Tensor | None]:
    """Return the mask without rejected samples, and importance weights, by verl's own functions."""
    from verl.trainer.ppo import rollout_corr_helper

    mask = values["mask"]
    if "rollout_is" not in keys:
        return mask, None
    log_ratio = (prev - values["generation"]).detach()
    weights, _ = rollout_corr_helper.compute_rollout_correction_weights(
        log_ratio, mask, keys["rollout_is"], keys["rollout_is_threshold"]
    )
    if "rollout_rs" in keys:
        mask, _ = rollout_corr_helper.compute_rollout_rejection_mask(
            log_ratio, mask, keys["rollout_rs"], keys["rollout_rs_threshold"]
        )
    return mask.to(torch.int64), weights


ESTIMATORS: Mapping[str, Sequence[str]] = {
    "grpo": ("masked_in_group", "alone_without_baseline"),
    "grpo_not_normalized": ("masked_in_group", "alone_without_baseline"),
    "rloo": ("masked_in_group", "alone_without_baseline"),
    "reinforce_plus_plus": ("unbiased_whitening",),
    "reinforce_plus_plus_baseline": ("masked_in_group", "alone_without_baseline", "unbiased_whitening"),
}


def advantages(samples: Sequence[dict[str, Any]], estimator: str) -> list[float]:
    """Return verl's advantage of each sample's first generated token; 0 for samples that do not train."""
    import numpy
    from omegaconf import OmegaConf
    from verl.trainer.ppo import core_algos

    width = max(sum(sample["generated"]) for sample in samples) + 1
    mask, rewards = torch.zeros(2, len(samples), width, dtype=torch.float64)
    for row, sample in enumerate(samples):
        length = sum(sample["generated"])
        mask[row, :length] = float(sample["trains"])
        rewards[row, max(length - 1, 0)] = sample[
            "reward"
        ]  # on the last token, as its reward managers put it
    keys: dict[str, Any] = {"token_level_rewards": rewards, "response_mask": mask}
    index = numpy.array([sample["group"] for sample in samples])
    if estimator.startswith("grpo"):
        compute = core_algos.compute_grpo_outcome_advantage
        keys |= {"index": index, "norm_adv_by_std_in_grpo": estimator == "grpo"}
    elif estimator == "reinforce_plus_plus":
        compute = core_algos.compute_reinforce_plus_plus_outcome_advantage
        keys["config"] = OmegaConf.create({"gamma": 1.0})
    else:
        compute = {
            "rloo": core_algos.compute_rloo_outcome_advantage,
            "reinforce_plus_plus_baseline": (
                core_algos.compute_reinforce_plus_plus_baseline_outcome_advantage
            ),
        }[estimator]
        keys["index"] = index
    found, _ = compute(**keys)
    return found[:, 0].tolist()
