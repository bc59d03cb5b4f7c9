"""What every case of the kit must give: dense, in float64, sample by sample, with nothing of nemo_like.

A batch is a list of samples of token ids and a table of logits: the log-prob of a token is that of the
table's row of the token before it. ``logprobs`` and ``entropies`` hold one [generated tokens] tensor per
sample, so that another model can stand in for the table. Formulas: docs/losses.md.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LIMIT, KL_LIMIT = 20.0, 10.0  # nats
LEARNING_RATE, BETAS, EPSILON = 0.1, (0.9, 0.99), 1e-3  # of the update: AdamW's first, without weight decay


def table_scores(table: Tensor, samples: Sequence[dict[str, Any]]) -> tuple[list[Tensor], list[Tensor]]:
    """Return log-probs and entropies of each sample's generated tokens."""
    logprobs, entropies = [], []
    for sample in samples:
        places = [place for place, is_generated in enumerate(sample["generated"]) if is_generated]
        ids, at = torch.tensor(sample["ids"]), torch.tensor(places, dtype=torch.int64)
        rows = table[ids[at - 1]].log_softmax(-1)
        logprobs.append(rows.gather(1, ids[at, None])[:, 0])
        entropies.append(-(rows.exp() * rows).sum(-1))
    return logprobs, entropies


def evaluate(table: Tensor, samples: Sequence[dict[str, Any]], case: dict[str, Any]) -> dict[str, Any]:
    """Return the loss, its gradient by each generated token's log-prob, and the table's first update."""
    table = table.clone().requires_grad_()
    logprobs, entropies = table_scores(table, samples)
    total = loss(logprobs, entropies, samples, case)
    gradients = torch.autograd.grad(total, [*logprobs, table], retain_graph=True, allow_unused=True)
    by_token = [
        torch.zeros_like(one) if gradient is None else gradient
        for one, gradient in zip(logprobs, gradients, strict=False)
    ]
    return {
        "loss": total.item(),
        "gradient": torch.cat(by_token).tolist(),
        "update": first_update(gradients[-1]).flatten().tolist(),
    }


def first_update(gradient: Tensor) -> Tensor:
    """Return how AdamW's first step moves a weight: both moments, freed of their bias, are the gradient's."""
    return -LEARNING_RATE * gradient / (gradient.abs() + EPSILON)


def loss(
    logprobs: Sequence[Tensor],
    entropies: Sequence[Tensor],
    samples: Sequence[dict[str, Any]],
    case: dict[str, Any],
) -> Tensor:
    """Return the loss of the whole global batch."""
    trained = [place for place, sample in enumerate(samples) if sample["trains"]]
    num_tokens = sum(len(logprobs[place]) for place in trained)
    total = torch.zeros((), dtype=torch.float64)
    for place in trained:
        length = len(logprobs[place])
        if not length:
            continue  # it counts among the samples, and has nothing to add
        share = {
            "token": 1 / num_tokens,
            "sample": 1 / (length * len(trained)),
            "constant": 1 / (case["constant"] * len(trained)),
        }[case["mean"]]
        per_token = _sample_loss(logprobs[place], samples[place], case)
        total = total + share * (per_token - case["entropy"] * entropies[place]).sum()
    return total


def _sample_loss(logprobs: Tensor, sample: dict[str, Any], case: dict[str, Any]) -> Tensor:
    kind, advantage = case["loss"], sample["advantage"]
    generation, prev = _column(sample, "generation"), _column(sample, "prev")
    if kind == "on_policy":
        prev = logprobs.detach()
    if kind == "engine_ratio":
        prev = generation
    log_ratio = logprobs - prev
    if kind == "gspo":
        log_ratio = log_ratio.mean().expand(len(logprobs))
    if kind == "gspo_token":
        log_ratio = log_ratio.mean().detach() + logprobs - logprobs.detach()
    ratio = log_ratio.clamp(-LIMIT, LIMIT).exp()
    clipped = ratio.clamp(1 - case["clip_low"], 1 + case["clip_high"])
    if kind == "reinforce":
        value = -advantage * logprobs
    elif kind == "cispo":
        value = -advantage * clipped.detach() * logprobs
    elif kind == "sapo":
        tau = case["tau_pos"] if advantage > 0 else case["tau_neg"]
        value = -advantage * 4 / tau / (1 + (-tau * (ratio - 1)).exp())
    else:
        value = torch.maximum(-advantage * ratio, -advantage * clipped)
        if case["dual_clip"] and advantage < 0:
            value = value.clamp(max=-advantage * case["dual_clip"])
    if case["correction"]:
        value = value * _weights((prev - generation).detach(), case)
    if case["kl"]:
        value = value + case["kl"]["beta"] * _kl(logprobs, _column(sample, "reference"), case["kl"]["kind"])
    return value


def _weights(difference: Tensor, case: dict[str, Any]) -> Tensor:
    """Return what multiplies the policy-gradient term: the trainer's over the engine's probability."""
    correction, log_weights = case["correction"], difference.clamp(-LIMIT, LIMIT)
    judged = log_weights
    if case["loss"] in ("gspo", "gspo_token"):
        judged = log_weights = log_weights.sum().clamp(-LIMIT, LIMIT).expand(len(difference))
    elif correction["type"] == "seq_mask":
        judged = log_weights.mean().expand(len(difference))
    weights, low, high = log_weights.exp(), correction["low"], correction["high"]
    if correction["type"] == "plain":
        return weights
    if correction["type"] == "tis":
        return weights.clamp(low, high)
    return torch.where((judged.exp() >= low) & (judged.exp() <= high), weights, 0.0)


def _kl(logprobs: Tensor, reference: Tensor, kind: str) -> Tensor:
    x = (reference - logprobs).clamp(-LIMIT, LIMIT)
    estimate = {"k1": -x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[kind]
    return (estimate * (logprobs - logprobs.detach()).exp()).clamp(-KL_LIMIT, KL_LIMIT)


def _column(sample: dict[str, Any], name: str) -> Tensor:
    return torch.tensor(sample[name], dtype=torch.float64)


def advantages(samples: Sequence[dict[str, Any]], estimator: str) -> list[float]:
    """Return the advantage of each sample by this estimator; 0 for samples that do not train."""
    trained = [sample for sample in samples if sample["trains"]]
    values = [_advantage(sample, trained, estimator) if sample["trains"] else 0.0 for sample in samples]
    if not estimator.startswith("reinforce_plus_plus"):
        return values
    pairs = [(v, sum(s["generated"])) for v, s in zip(values, samples, strict=True) if s["trains"]]
    num_tokens = sum(count for _, count in pairs)
    if not num_tokens or len({value for value, _ in pairs}) == 1:
        return [0.0] * len(samples)
    mean = math.fsum(value * count for value, count in pairs) / num_tokens
    variance = math.fsum(count * (value - mean) ** 2 for value, count in pairs) / num_tokens
    scale = 1 / math.sqrt(max(variance, 1e-8))
    return [(v - mean) * scale if s["trains"] else 0.0 for v, s in zip(values, samples, strict=True)]


def _advantage(sample: dict[str, Any], trained: Sequence[dict[str, Any]], estimator: str) -> float:
    group = [other for other in trained if other["group"] == sample["group"]]
    if estimator == "reinforce_plus_plus":
        return float(sample["reward"])
    if len(group) < 2:
        return 0.0
    compared = group
    if estimator in ("rloo", "grpo_leave_one_out"):
        compared = [other for other in group if other is not sample]
    rewards = [other["reward"] for other in compared]
    centred = sample["reward"] - statistics.fmean(rewards)
    deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    is_divided = estimator in ("grpo", "grpo_leave_one_out") and deviation > 0
    return centred / (deviation + 1e-6) if is_divided else centred
