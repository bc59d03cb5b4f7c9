"""What the adapters share: padded batches of a split, and the sum over micro-batches and ranks.

An adapter has ``NAME``, ``version()``, ``REMARK`` (what a reader of its results must know, or nothing),
``SPLITS`` (those that the framework can make), ``plan(case)`` (how it is asked for a case: one or more
``Asked``, or the reason why it cannot be) and ``micro_batch_loss(padded, asked)``. ``ESTIMATORS`` has the
conventions of each of its advantage estimators by name, and ``advantages(samples, name)`` calls one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.conformance.reference import table_scores


@dataclass(frozen=True, slots=True)
class Asked:
    """How a framework is asked for a case: its own ``keys``, and the ``conventions`` that then apply."""

    case: Mapping[str, Any]
    keys: Mapping[str, Any]
    conventions: Sequence[str] = ()

    @property
    def label(self) -> str:
        """The keys as one would write them."""
        return ", ".join(f"{name}={value}" for name, value in self.keys.items())


OF_TOKENS = "what gives single tokens other advantages or shares was not asked for"


def is_of_tokens(case: Mapping[str, Any]) -> bool:
    """Return whether tokens of a case have other advantages or shares than their samples, or move."""
    return bool(
        case.keys() & {"top_entropy", "likelihood", "penalties", "is_moving"}
        or (case["kl"] and case["kl"].get("in_reward"))
    )


@dataclass(frozen=True, slots=True)
class Absent:
    """Why a framework cannot be asked for a case."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """One micro-batch of B samples, right-padded from the first generated token on to T tokens."""

    logprobs: Tensor  # [B, T] float64, with the gradient
    entropies: Tensor  # [B, T]
    mask: Tensor  # [B, T] int64: 1 on generated tokens of samples that train
    is_token: Tensor  # [B, T] int64: 1 on tokens after the prompt
    generated: Tensor  # [B, T] int64: 1 on tokens that the policy generated
    columns: Mapping[str, Tensor]  # prev, generation, reference: [B, T]; advantage: [B]
    num_ranks: int
    num_micro_batches: int  # of this rank
    rows: Sequence[int]  # which samples of the global batch these are
    whole: Mapping[str, Tensor]  # the same of the whole global batch: logprobs, mask, prev, generation


def run_split(one: dict[str, Any], split: str, compute: Callable[[Padded], Tensor]) -> dict[str, Any]:
    """Return loss and gradient per generated token: summed over micro-batches, averaged over ranks.

    That is what distributed data parallelism does with what a framework back-propagates.
    """
    table = torch.tensor(one["table"], dtype=torch.float64, requires_grad=True)
    samples, ranks = one["samples"], one["splits"][split]
    logprobs, entropies = table_scores(table, samples)
    total = torch.zeros((), dtype=torch.float64)
    of_samples = [_row(*values) for values in zip(samples, logprobs, entropies, strict=True)]
    longest = max(len(part["mask"]) for part in of_samples)
    whole = {
        name: torch.stack([_padded(part[name], longest) for part in of_samples])
        for name in ("logprobs", "mask", "prev", "generation")
    }
    for rank in ranks:
        for rows in rank:
            parts = [of_samples[row] for row in rows]
            width = max(len(part["mask"]) for part in parts)
            stacked = {
                name: torch.stack([_padded(part[name], width) for part in parts])
                for name in parts[0]
                if name != "advantage"
            }
            columns = {name: stacked[name] for name in ("prev", "generation", "reference")}
            columns["advantage"] = torch.stack([part["advantage"] for part in parts])
            padded = Padded(
                logprobs=stacked["logprobs"],
                entropies=stacked["entropies"],
                mask=stacked["mask"],
                is_token=stacked["is_token"],
                generated=stacked["generated"],
                columns=columns,
                num_ranks=len(ranks),
                num_micro_batches=len(rank),
                rows=rows,
                whole=whole,
            )
            total = total + compute(padded) / len(ranks)
    gradients = torch.autograd.grad(total, logprobs, allow_unused=True)
    by_token = [
        torch.zeros_like(own) if gradient is None else gradient
        for own, gradient in zip(logprobs, gradients, strict=True)
    ]
    return {"loss": total.item(), "gradient": torch.cat(by_token).tolist()}


def _row(sample: dict[str, Any], logprobs: Tensor, entropies: Tensor) -> dict[str, Tensor]:
    """Return what one sample has after its prompt, a value per token; 0 on tokens that were not generated."""
    generated = torch.tensor(sample["generated"][2:])
    at = generated.nonzero()[:, 0]

    def spread(values: Tensor) -> Tensor:
        return torch.zeros(len(generated), dtype=torch.float64).index_copy(0, at, values)

    columns = {
        name: spread(torch.tensor(sample[name], dtype=torch.float64))
        for name in ("prev", "generation", "reference")
    }
    return {
        "logprobs": spread(logprobs),
        "entropies": spread(entropies),
        "mask": generated * int(sample["trains"]),
        "is_token": torch.ones_like(generated),
        "generated": generated,
        "advantage": torch.tensor(sample["advantage"], dtype=torch.float64),
        **columns,
    }


def _padded(values: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, width - len(values)))
