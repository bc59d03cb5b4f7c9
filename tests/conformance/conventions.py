"""What other frameworks do otherwise, each as a change of the reference, to explain deviations by.

A framework's result that equals the reference with a set of conventions is explained by them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from tests.conformance.reference import (
    KL_LIMIT,
    KL_SCALE,
    LIMIT,
    flags_of,
    likelihood_weights,
    table_scores,
)

CONVENTIONS = {
    "masked_count": "samples that do not train count in the denominator of a mean over samples",
    "micro_batch_mean": "the token-level mean is one per micro-batch, then one over micro-batches and ranks",
    "entropy_by_tokens": (
        "the entropy's mean is over the tokens of a micro-batch, then over micro-batches and ranks"
    ),
    "rejected_leave": "samples that the correction rejects leave the denominator of the token-level mean",
    "always_sample_mean": "the loss is always averaged per sample, whatever mean is configured",
    "no_ratio_limit": "log-ratios are not limited",
    "sample_ratio_to_10": "the log-ratio of a sample is limited to at most 10, and not below",
    "weight_no_limit": "logarithms of importance weights are not limited",
    "weight_limit_once": "the logarithm of a sample's weight is limited once, not those of its tokens too",
    "weight_by_sample": "the weight is the product over the sample, which is also what the bounds judge",
    "upper_bound_only": "CISPO's ratio has no lower bound",
    "kl_path": "the KL's gradient is that of its path alone, without the score function",
    "kl_by_ratio": "the KL is multiplied by the policy's ratio, whose gradient it has too",
    "kl_no_limit": "the KL is not limited",
    "kl_limit_k3_only": "the KL is limited for k3 alone",
}


def evaluate_as(
    one: dict[str, Any], case: dict[str, Any], split: str, names: Collection[str]
) -> dict[str, Any]:
    """Return loss and gradient as ``reference.evaluate`` does, under these conventions and one split."""
    table = torch.tensor(one["table"], dtype=torch.float64, requires_grad=True)
    logprobs, entropies = table_scores(table, one["samples"])
    samples = [
        {**sample, "is_rejected": _is_rejected(sample, own.detach(), case), "place": place}
        for place, (sample, own) in enumerate(zip(one["samples"], logprobs, strict=True))
    ]
    least = _least_surprisal(samples, case)
    likelihoods = likelihood_weights(samples, {"likelihood": 0.0, **case})
    total = torch.zeros((), dtype=torch.float64)
    for rank in one["splits"][split]:
        for rows in rank:
            parts = 1 / (len(one["splits"][split]) * len(rank))
            for row in rows:
                if not samples[row]["trains"] or not len(logprobs[row]):
                    continue
                values = _token_values(logprobs[row], samples[row], case, names, least)
                total = total - likelihoods[row] * logprobs[row].sum()
                share = _share(case, samples, rows, row, names)
                total = total + share * (parts if "micro_batch_mean" in names else 1) * values.sum()
                if "entropy_by_tokens" in names:
                    num_tokens = sum(_size(samples[other]) for other in rows if samples[other]["trains"])
                    total = total - case["entropy"] * parts * entropies[row].sum() / num_tokens
                else:
                    total = total - case["entropy"] * share * entropies[row].sum()
    gradients = (
        torch.autograd.grad(total, logprobs, allow_unused=True, retain_graph=True)
        if total.requires_grad
        else []
    )
    by_token = [
        torch.zeros_like(own) if gradient is None else gradient
        for own, gradient in zip(logprobs, gradients or [None] * len(logprobs), strict=True)
    ]
    return {"loss": total.item(), "gradient": torch.cat(by_token).tolist()}


def _size(sample: dict[str, Any]) -> int:
    return sum(sample["generated"])


def _share(
    case: dict[str, Any],
    samples: Sequence[dict[str, Any]],
    rows: Sequence[int],
    row: int,
    names: Collection[str],
) -> float:
    counted = [sample for sample in samples if sample["trains"]]
    mean = "sample" if "always_sample_mean" in names else case["mean"]
    if mean == "token":
        if "micro_batch_mean" in names:
            counted = [samples[other] for other in rows if samples[other]["trains"]]
        if "rejected_leave" in names:
            counted = [sample for sample in counted if not sample["is_rejected"]]
        return 1 / max(sum(map(_size, counted)), 1)
    num_samples = len(samples) if "masked_count" in names else len(counted)
    return 1 / (num_samples * (case["constant"] if mean == "constant" else _size(samples[row])))


def _is_rejected(sample: dict[str, Any], own: Tensor, case: dict[str, Any]) -> bool:
    if not _size(sample) or (case["correction"] or {}).get("type") != "seq_mask":
        return False
    prev = own if case["loss"] == "on_policy" else _values(sample, "prev")
    difference = (prev - _values(sample, "generation")).clamp(-LIMIT, LIMIT)
    low, high = case["correction"]["low"], case["correction"]["high"]
    return not low <= difference.mean().exp().item() <= high


def _advantages(sample: dict[str, Any], case: dict[str, Any]) -> Tensor:
    """Return the advantages of a sample's tokens."""
    values = torch.full((_size(sample),), float(sample["advantage"]), dtype=torch.float64)
    if case["kl"] and case["kl"].get("in_reward"):
        log_ratio = _values(sample, "reference") - _values(sample, "prev")
        estimates = _kl(log_ratio, case["kl"]["kind"], ("kl_path",))
        values = values - KL_SCALE * estimates.flip(0).cumsum(0).flip(0)
    by_call, by_thought = case.get("penalties", (None, None))
    penalty = {1: by_call, 2: by_thought, 3: by_call}.get(flags_of(sample["place"]))
    return values if penalty is None else torch.full_like(values, penalty)


def _least_surprisal(samples: Sequence[dict[str, Any]], case: dict[str, Any]) -> float:
    """Return the surprisal from which on tokens have a policy gradient."""
    found = sorted(-value for sample in samples if sample["trains"] for value in sample["generation"])
    wanted = round(case.get("top_entropy", 1.0) * len(found), 6)
    return found[len(found) - math.ceil(wanted)]


def _token_values(
    logprobs: Tensor, sample: dict[str, Any], case: dict[str, Any], names: Collection[str], least: float
) -> Tensor:
    kind, advantage = case["loss"], _advantages(sample, case)
    own, generation, prev = logprobs.detach(), _values(sample, "generation"), _values(sample, "prev")
    prev = {"on_policy": own, "engine_ratio": generation}.get(kind, prev)
    log_ratio = logprobs - prev
    if kind == "gspo":
        log_ratio = log_ratio.mean().expand(len(own))
    elif kind == "gspo_token":
        log_ratio = log_ratio.mean().detach() + logprobs - own
    if "sample_ratio_to_10" in names:
        log_ratio = log_ratio.clamp(max=10.0)
    elif "no_ratio_limit" not in names:
        log_ratio = log_ratio.clamp(-LIMIT, LIMIT)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(
        None if "upper_bound_only" in names else 1 - case["clip_low"], 1 + case["clip_high"]
    )
    if kind in ("reinforce", "cispo"):
        value = -advantage * logprobs * (clipped.detach() if kind == "cispo" else 1.0)
    elif kind == "sapo":
        tau = torch.full_like(own, case["tau_neg"]).masked_fill(advantage > 0, case["tau_pos"])
        value = -advantage * 4 / tau * torch.sigmoid(tau * (ratio - 1))
    else:
        value = torch.maximum(-advantage * ratio, -advantage * clipped)
        if case["dual_clip"]:
            bounded = torch.minimum(value, -advantage * case["dual_clip"])
            value = torch.where(advantage < 0, bounded, value)
    if case["correction"]:
        value = value * _weights((prev - generation).detach(), case, names)
    to_engine = (generation - own).clamp(-LIMIT, LIMIT)
    bound = case.get("off_policy_mask")
    if bound is not None and to_engine.mean() > bound:
        value = torch.where(advantage < 0, 0.0, value)
    value = torch.where(-generation >= least, value, 0.0)
    if case["kl"] and not case["kl"].get("in_reward"):
        kl = _kl(_values(sample, "reference") - logprobs, case["kl"]["kind"], names)
        if case["kl"].get("weighed"):
            kl = kl * (-to_engine).exp()
        value = value + case["kl"]["beta"] * kl * (ratio if "kl_by_ratio" in names else 1.0)
    return value


def _weights(difference: Tensor, case: dict[str, Any], names: Collection[str]) -> Tensor:
    correction = case["correction"]
    bound = LIMIT if "weight_no_limit" not in names else torch.inf
    log_weights = difference if "weight_limit_once" in names else difference.clamp(-bound, bound)
    judged = log_weights
    if case["loss"] in ("gspo", "gspo_token") or "weight_by_sample" in names:
        judged = log_weights = log_weights.sum().clamp(-bound, bound).expand(len(difference))
    elif correction["type"] == "seq_mask":
        judged = log_weights.mean().expand(len(difference))
    weights, low, high = log_weights.exp(), correction["low"], correction["high"]
    if correction["type"] in ("plain", "tis"):
        return weights if high is None else weights.clamp(low, high)
    return torch.where((judged.exp() >= low) & (judged.exp() <= high), weights, 0.0)


def _kl(x: Tensor, kind: str, names: Collection[str]) -> Tensor:
    is_limited = "kl_no_limit" not in names and not ("kl_limit_k3_only" in names and kind != "k3")
    x = x.clamp(-LIMIT, LIMIT) if is_limited else x
    estimate = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[kind]
    if not {"kl_path", "kl_by_ratio"} & {*names}:
        estimate = estimate * (x.detach() - x).exp()
    return estimate.clamp(-KL_LIMIT, KL_LIMIT) if is_limited else estimate


def _values(sample: dict[str, Any], name: str) -> Tensor:
    return torch.tensor(sample[name], dtype=torch.float64)


OF_ADVANTAGES = {
    "masked_in_group": "rewards of samples that do not train count in the statistics of their group",
    "alone_without_baseline": "a sample alone in its group has its reward as advantage, not 0",
    "unbiased_whitening": "whitening divides by the unbiased variance plus 1e-8",
}


def advantages_as(samples: Sequence[dict[str, Any]], estimator: str, names: Collection[str]) -> list[float]:
    """Return what ``reference.advantages`` does, under these conventions."""
    trained = [sample for sample in samples if sample["trains"]]
    counted = samples if "masked_in_group" in names else trained
    values = [_advantage_as(sample, counted, estimator, names) for sample in samples]
    if estimator.startswith("reinforce_plus_plus"):
        sizes = torch.tensor([_size(sample) * sample["trains"] for sample in samples], dtype=torch.float64)
        of_samples, total = torch.tensor(values, dtype=torch.float64), sizes.sum()
        mean = (sizes * of_samples).sum() / total
        variance = (sizes * (of_samples - mean) ** 2).sum() / total
        is_unbiased = "unbiased_whitening" in names
        variance = variance * total / (total - 1) + 1e-8 if is_unbiased else variance.clamp(min=1e-8)
        values = ((of_samples - mean) / variance.sqrt()).tolist()
    return [value if sample["trains"] else 0.0 for value, sample in zip(values, samples, strict=True)]


def _advantage_as(
    sample: dict[str, Any], counted: Sequence[dict[str, Any]], estimator: str, names: Collection[str]
) -> float:
    reward = float(sample["reward"])
    group = [other for other in counted if other["group"] == sample["group"]]
    if estimator == "reinforce_plus_plus":
        return reward
    if len(group) < 2:
        alone = reward / (1 + 1e-6) if estimator == "grpo" else reward  # a deviation of 1
        return alone if "alone_without_baseline" in names else 0.0
    compared = [other for other in group if other is not sample] if estimator == "rloo" else group
    rewards = torch.tensor([other["reward"] for other in compared], dtype=torch.float64)
    deviation = rewards.std().item() if estimator == "grpo" and len(rewards) > 1 else 0.0
    centred = reward - rewards.mean().item()
    return centred / (deviation + 1e-6) if deviation else centred
