"""What every case of the kit must give: in float64, by the reference that the tripwires compare with too.

A batch is a list of samples of token ids and a table of logits: the log-prob of a token is that of the
table's row of the token before it. ``tripwires.reference_loss`` and ``tripwires.reference_advantages`` have
the formulas of docs/explanation/losses.md and docs/explanation/rewards.md, written out a second time, with
nothing of ``algorithms``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from nemo_like.tripwires.reference_advantages import RewardedSamples, reference_advantages
from nemo_like.tripwires.reference_loss import ReferenceTerms, ScoredTokens, reference_terms
from tests.conformance.loss_configs import loss_config

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
        adv_estimator=SimpleNamespace(name=name),
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
    )
    found = reference_advantages(rewarded, cfg)
    assert found is not None
    return found


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
    return ScoredTokens(
        logprobs=logprobs,
        prev=ratio_to.get(case["loss"], column("prev")),
        advantages=advantage,
        advantage_sizes=advantage.abs(),
        trains=by_token([sample["trains"] for sample in samples]) > 0,
        sample=torch.arange(len(samples)).repeat_interleave(lengths),
        num_samples=len(samples),
        update_tokens=torch.full_like(logprobs, sum(sum(sample["generated"]) for sample in trained)),
        update_samples=torch.full_like(logprobs, len(trained)),
        generation=column("generation"),
        reference=column("reference"),
        entropy=entropies if case["entropy"] else None,
    )
