"""What every case of the kit must give: in float64, by the reference that the tripwires compare with too.

A batch is a list of samples of token ids and a table of logits: the log-prob of a token is that of the
table's row of the token before it. ``tripwires.reference_loss`` and ``tripwires.reference_advantages`` have
the formulas of docs/explanation/losses.md and docs/explanation/rewards.md, written out a second time, with
nothing of ``algorithms``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nemo_like.algorithms.options import KLType
from nemo_like.tripwires.reference_advantages import RewardedSamples, reference_advantages
from nemo_like.tripwires.reference_loss import (
    ReferenceTerms,
    ScoredTokens,
    kl_to_go,
    punished,
    reference_terms,
)
from tests.conformance.loss_configs import loss_config

GDPO_WEIGHTS = {"right": 1.0, "brief": 0.5}
LIMIT, KL_LIMIT = 20.0, 10.0  # nats
KL_SCALE = 0.1  # of the KL in the reward
SOLVED_REWARD = 0.5  # of right answers
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
    terms = loss_terms(logprobs, entropies, samples, case)
    (by_table,) = torch.autograd.grad(with_gradients(terms, logprobs, entropies), table)
    return {
        "loss": terms.loss.sum().item(),
        "gradient": terms.gradient.tolist(),
        "update": first_update(by_table).flatten().tolist(),
    }


def loss_terms(
    logprobs: Sequence[Tensor],
    entropies: Sequence[Tensor],
    samples: Sequence[dict[str, Any]],
    case: dict[str, Any],
) -> ReferenceTerms:
    """Return the loss of a batch, which is one update, and its gradients, by generated token.

    ``logprobs`` and ``entropies`` hold one [generated tokens] tensor for each sample: of the table, or of
    another model that stands in for it.
    """
    tokens = _tokens(torch.cat(list(logprobs)).detach(), torch.cat(list(entropies)).detach(), samples, case)
    return reference_terms(tokens, loss_config(case))


def with_gradients(terms: ReferenceTerms, logprobs: Sequence[Tensor], entropies: Sequence[Tensor]) -> Tensor:
    """Return a value, not the loss, whose gradient by what computed the scores is the loss's."""
    return terms.gradient @ torch.cat(list(logprobs)) + terms.entropy_gradient @ torch.cat(list(entropies))


def first_update(gradient: Tensor) -> Tensor:
    """Return how AdamW's first step moves a weight: both moments, freed of their bias, are the gradient's."""
    return -LEARNING_RATE * gradient / (gradient.abs() + EPSILON)


def advantages(samples: Sequence[dict[str, Any]], estimator: str) -> list[float]:
    """Return the advantage of each sample by this estimator; 0 for samples that do not train."""
    name = "grpo" if estimator.startswith("grpo") else estimator
    cfg: Any = SimpleNamespace(
        adv_estimator=SimpleNamespace(name=name, reward_weights=GDPO_WEIGHTS),
        normalize_rewards=estimator != "grpo_not_normalized",
        use_leave_one_out_baseline=estimator == "grpo_leave_one_out",
        advantage_clip_low=-0.5 if estimator == "grpo_clipped" else None,
        advantage_clip_high=0.5 if estimator == "grpo_clipped" else None,
    )
    rewarded = RewardedSamples(
        rewards=[sample["reward"] for sample in samples],
        groups=[sample["group"] for sample in samples],
        trains=[sample["trains"] for sample in samples],
        num_tokens=[sum(sample["generated"]) for sample in samples],
        components=reward_components(samples),
    )
    found = reference_advantages(rewarded, cfg)
    assert found is not None
    return found


def reward_components(samples: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the parts of the rewards: what the batch has, and one for short responses."""
    return {
        "right": [sample["reward"] for sample in samples],
        "brief": [1 / (1 + sum(sample["generated"])) for sample in samples],
    }


def _tokens(
    logprobs: Tensor, entropies: Tensor, samples: Sequence[dict[str, Any]], case: dict[str, Any]
) -> ScoredTokens:
    """Return the generated tokens of a batch, which is one update."""
    lengths = torch.tensor([sum(sample["generated"]) for sample in samples])
    trained = [sample for sample in samples if sample["trains"]]

    def by_token(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).repeat_interleave(lengths)

    def column(name: str) -> Tensor:
        return torch.tensor([value for sample in samples for value in sample[name]], dtype=torch.float64)

    ratio_to = {"on_policy": logprobs, "engine_ratio": column("generation")}
    advantage = by_token([sample["advantage"] for sample in samples])
    numbers = torch.arange(len(samples)).repeat_interleave(lengths)
    trains = by_token([sample["trains"] for sample in samples]) > 0
    sizes = advantage.abs()
    if case["kl"] and case["kl"].get("in_reward"):
        log_ratio, kind = column("reference") - column("prev"), KLType[case["kl"]["kind"]]
        gained = -KL_SCALE * kl_to_go(log_ratio, numbers, len(samples), kind)
        advantage, sizes = advantage + gained, sizes + gained.abs()
    if "penalties" in case:
        flags = by_token([flags_of(place) for place in range(len(samples))])
        advantage, sizes = punished(advantage, sizes, flags, loss_config(case))
    return ScoredTokens(
        logprobs=logprobs,
        prev=ratio_to.get(case["loss"], column("prev")),
        advantages=advantage,
        advantage_sizes=sizes,
        trains=trains,
        sample=numbers,
        num_samples=len(samples),
        update_tokens=torch.full_like(logprobs, sum(sum(sample["generated"]) for sample in trained)),
        update_samples=torch.full_like(logprobs, len(trained)),
        generation=column("generation"),
        reference=column("reference"),
        entropy=entropies if case["entropy"] else None,
        gate=None if "top_entropy" not in case else _gate(column("generation"), trains, case["top_entropy"]),
        likelihood=None if "likelihood" not in case else by_token(likelihood_weights(samples, case)),
        entropy_coefs=torch.full_like(logprobs, case["entropy"]) if case.get("is_moving") else None,
    )


def flags_of(place: int) -> int:
    """Return what is wrong with the responses of a sample, by its position in the batch."""
    return place % 4


def likelihood_weights(samples: Sequence[dict[str, Any]], case: dict[str, Any]) -> list[float]:
    """Return the weight of the log-probs of each sample's tokens: of right answers alone."""
    is_right = [sample["trains"] and sample["reward"] >= SOLVED_REWARD for sample in samples]
    num_tokens = sum(sum(sample["generated"]) for sample, one in zip(samples, is_right, strict=True) if one)
    return [case["likelihood"] / num_tokens if one and num_tokens else 0.0 for one in is_right]


def _gate(generation: Tensor, trains: Tensor, share: float) -> Tensor:
    """Return 1 for the tokens of highest entropy. In the batches the surprisal of the engine stands in for
    the entropy, which comes from another pass than that which trains."""
    found = -generation[trains]
    least = found.sort(descending=True).values[math.ceil(round(share * len(found), 6)) - 1]
    return (-generation >= least).double()
