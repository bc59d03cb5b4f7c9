"""Functions of a user's own, right and wrong: losses that read a column, an estimator and a filter."""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from nemo_like.algorithms.estimators import AdvantageInputs
from nemo_like.algorithms.losses import (
    LossTerms,
    LossTokens,
    TokenMean,
    logs,
    loss_terms,
    policy_ratio,
)
from nemo_like.algorithms.options import GRPOConfig, LossConfig
from nemo_like.algorithms.sample_filters import RolledOut
from nemo_like.batch.columns import reads
from nemo_like.batch.tags import NUM_RESPONSE_TOKENS, reads_tags
from tests.functional.own_columns import DESERVED, LEVEL, weighted
from tests.losses import clipped_loss


@reads(DESERVED)
def gated(tokens: LossTokens, cfg: LossConfig, tau: float = 1.0) -> LossTerms:
    tokens = replace(tokens, advantages=tokens.advantages * tokens.columns["deserved"])
    ratio = policy_ratio(tokens, cfg)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return loss_terms(-tokens.advantages * gate, ratio, ratio, tokens, cfg)


@reads(DESERVED, LEVEL)
@logs("credit")
def credited(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    """The loss of docs/reference/columns.md, which also tells the mean of what it multiplies advantages
    by."""
    credit = tokens.columns["deserved"] * tokens.columns["level"][tokens.sample_index]
    terms = weighted(tokens, cfg)
    return replace(terms, means={**terms.means, "credit": TokenMean(credit, tokens.mask)})


@reads_tags(NUM_RESPONSE_TOKENS)
def per_length(inputs: AdvantageInputs, cfg: GRPOConfig, power: float) -> list[float]:
    lengths = inputs.tags[NUM_RESPONSE_TOKENS.name]
    return [reward / length**power for reward, length in zip(inputs.rewards, lengths, strict=True)]


def every_second(samples: RolledOut, cfg: GRPOConfig) -> list[bool]:
    return [place % 2 == 0 for place in range(len(samples.rewards))]


def of_tokens(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    return replace(clipped_loss(tokens, cfg), loss=tokens.logprobs)


@reads(DESERVED)
def not_a_number(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    values = (tokens.columns["deserved"] - 1).log() * tokens.logprobs
    return replace(clipped_loss(tokens, cfg), loss=(tokens.weights * values).sum())


def slow(tokens: LossTokens, cfg: LossConfig, seconds: float) -> LossTerms:
    time.sleep(seconds)
    return clipped_loss(tokens, cfg)


@reads(DESERVED)
def misspelt(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    return replace(clipped_loss(tokens, cfg), loss=tokens.columns["deserves"].sum())
