"""Records a critic's losses and their gradients by value in a training phase, and compares them with the
formulas afterwards; also compares the advantages and returns that a critic wrote."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nemo_like.algorithms.critic import TokenValues
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_MASK,
    RETURNS,
    TOKEN_ADVANTAGES,
    VALUES,
    Column,
)
from nemo_like.batch.meta import GlobalBatch
from nemo_like.batch.tags import IS_TRUNCATED, SAMPLE_MASK, SHAPED_REWARD
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch
from nemo_like.policy.loss.objective import LossFunction
from nemo_like.policy.options import ValueConfig
from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.reference_loss import kl_estimates
from nemo_like.tripwires.reference_values import (
    EstimatedTokens,
    ValuedTokens,
    estimate_errors,
    greatest,
    value_terms,
)


@dataclass(slots=True)
class _ValuedBatch:
    """One micro-batch's inputs, values and loss; the backward pass adds the gradient."""

    batch: PolicyBatch
    values: Tensor
    inputs: ModelInputs
    update: GlobalBatch
    loss: Tensor
    number: int  # of the update within the phase
    gradients: list[Tensor] = field(default_factory=list)

    def column(self, column: Column) -> Tensor:
        return self.batch.columns[column.name][self.inputs.packed_index].double()

    @property
    def trains(self) -> Tensor:
        mask = self.batch.sample_values[SAMPLE_MASK.name][self.inputs.rows][self.inputs.sample_index]
        return mask > 0


class ValueWatch:
    """Watches the losses of one training phase of a critic on one rank."""

    def __init__(self, cfg: ValueConfig, *, sees_losses: bool = True) -> None:
        self.sees_losses, self._cfg = sees_losses, cfg
        self._micro_batches: list[_ValuedBatch] = []

    def watched(
        self, loss: LossFunction, batch: PolicyBatch, update: GlobalBatch, number: int, factor: float = 1.0
    ) -> LossFunction:
        """Return a function like ``loss`` that also records its inputs, results and gradients here.

        ``loss`` is the loss of update ``number``, counted from 0. The backward pass begins with ``factor``
        times its result, and gradients are recorded without the factor.
        """
        if not self.sees_losses:
            return loss

        def watched(outputs: TokenValues, inputs: ModelInputs) -> Tensor:
            given = loss(outputs, inputs)
            kept = _ValuedBatch(batch, outputs.values.detach(), inputs, update, given.detach(), number)
            if outputs.values.requires_grad:
                outputs.values.register_hook(
                    lambda gradient: kept.gradients.append(gradient.detach() / factor)
                )
            self._micro_batches.append(kept)
            return given

        return watched

    @torch.no_grad()
    def normalise(self, update: GlobalBatch, share: float) -> None:
        """Count all micro-batches so far as parts of ``update``, and multiply what they gave by ``share``."""
        for one in self._micro_batches:
            one.update, one.loss = update, one.loss * share
            one.gradients = [gradient * share for gradient in one.gradients]

    @torch.no_grad()
    def measured(self) -> dict[Measured, float]:
        """Compare the recorded losses with the formula; return the differences. A rank that valued no token
        returns nothing."""
        parts = self._micro_batches
        if not sum(len(one.values) for one in parts):
            return {}
        trains = torch.cat([one.trains for one in parts])
        sizes = [one.trains.double() / max(one.update.num_tokens, 1) for one in parts]
        tokens = ValuedTokens(
            values=torch.cat([one.values for one in parts]).double()[trains],
            old_values=torch.cat([one.column(VALUES) for one in parts])[trains],
            returns=torch.cat([one.column(RETURNS) for one in parts])[trains],
            shares=torch.cat(sizes)[trains],
        )
        due, slope, is_certain = value_terms(tokens, self._cfg.clip_range)
        none = [torch.zeros_like(one.values) for one in parts]
        given = torch.cat(
            [sum(one.gradients, start) for one, start in zip(parts, none, strict=True)]
        ).double()
        scale = (tokens.shares * (tokens.values.abs() + tokens.returns.abs())).clamp(min=1e-30)
        errors = torch.where(is_certain, (given[trains] - slope).abs() / scale, 0.0)
        loss = torch.stack([one.loss for one in parts]).double().sum()
        terms = (tokens.shares * (tokens.values.square() + tokens.returns.square())).sum()
        found = {
            Measured.num_trained_tokens: float(trains.sum()),
            Measured.loss_gradient: greatest(given.abs()),
            Measured.loss_gradient_error: max(greatest(errors), float((given[~trains] != 0).any())),
            Measured.loss_error: greatest((loss - due.sum()).abs() / terms.clamp(min=1e-30)),
        }
        is_first = torch.cat([torch.full_like(one.trains, one.number == 0) for one in parts])[trains]
        gaps, largest = (tokens.values - tokens.old_values).abs(), tokens.values.abs()
        if bool(is_first.any()):
            found[Measured.first_value_gap] = greatest(gaps[is_first]) / max(greatest(largest), 1e-30)
        return found


@torch.no_grad()
def estimated(batch: PolicyBatch, ends: Tensor, cfg: ValueConfig, loss: LossConfig) -> dict[Measured, float]:
    """Compare a batch's advantages and returns with GAE's equation.

    ``ends`` has the value behind the last token of each token run, [runs]; ``loss`` says whether rewards have
    a KL term.
    """
    columns = {name: column.cpu() for name, column in batch.columns.items()}
    positions = columns[RESPONSE_MASK.name].nonzero().squeeze(1)
    if not len(positions):
        return {}
    sample = torch.repeat_interleave(torch.arange(len(batch)), batch.lengths)[positions]
    run = batch.runs.of_tokens(positions)
    is_last = torch.ones_like(run, dtype=torch.bool)
    is_last[:-1] = run[1:] != run[:-1]

    def of_samples(name: str) -> Tensor:
        return batch.sample_values[name].cpu().double()[sample]

    rewards = torch.where(is_last, of_samples(SHAPED_REWARD.name), 0.0)
    if loss.use_kl_in_reward:
        difference = columns[REFERENCE_LOGPROBS.name].double() - columns[PREV_LOGPROBS.name].double()
        kl = kl_estimates(difference[positions], loss.reference_policy_kl_type)
        rewards = rewards - loss.reference_policy_kl_penalty * kl
    is_open = (of_samples(IS_TRUNCATED.name) > 0) & cfg.bootstrap_truncated
    of_policy: float | Tensor = cfg.gae_lambda if cfg.gae_lambda_policy is None else cfg.gae_lambda_policy
    if cfg.gae_length_adaptive_alpha is not None:
        lengths = torch.bincount(run, minlength=len(batch.runs)).double()
        of_policy = (1 - 1 / (cfg.gae_length_adaptive_alpha * lengths[run])).clamp(min=0)
    errors = estimate_errors(
        EstimatedTokens(
            run=run,
            values=columns[VALUES.name].double()[positions],
            advantages=columns[TOKEN_ADVANTAGES.name].double()[positions],
            returns=columns[RETURNS.name].double()[positions],
            rewards=rewards,
            end_values=torch.where(is_open, ends.double()[run], 0.0),
            trains=of_samples(SAMPLE_MASK.name) > 0,
            lambdas=(of_policy, cfg.gae_lambda),
            gamma=cfg.gae_gamma,
        )
    )
    return dict(zip((Measured.advantage_error, Measured.return_error), errors, strict=True))
