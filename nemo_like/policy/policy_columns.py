"""Which columns the policy's phases and the loss write and read. Standard library only: a run is checked by
this before anything heavy is loaded."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    INPUT_IDS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_MASK,
    Column,
    Declaration,
)
from nemo_like.config.derived import scores_prev_logprobs
from nemo_like.config.schema import LossConfig


def scored_columns(loss: LossConfig) -> tuple[Column, ...]:
    """The log-probs that the trainer computes before it trains, since the loss compares with them."""
    columns = [PREV_LOGPROBS] if scores_prev_logprobs(loss) else []
    if loss.reference_policy_kl_penalty > 0:
        columns.append(REFERENCE_LOGPROBS)
    return tuple(columns)


def scoring_reads(columns: Sequence[Column], loss: LossConfig) -> tuple[Column, ...]:
    """What a log-prob phase needs in order to write ``columns``, and the tags that come with them."""
    reads = [INPUT_IDS, RESPONSE_MASK]
    if PREV_LOGPROBS in columns:
        reads.append(GENERATION_LOGPROBS)
    elif columns and loss.use_kl_in_reward:
        reads.append(PREV_LOGPROBS)
    return tuple(reads)


def training_reads(loss: LossConfig, own: Sequence[Column] = ()) -> tuple[Column, ...]:
    """What training needs; ``own`` is what a loss of the user's reads besides."""
    reads = [INPUT_IDS, RESPONSE_MASK, *scored_columns(loss)]
    if loss.use_importance_sampling_correction or not scores_prev_logprobs(loss):
        reads.append(GENERATION_LOGPROBS)
    return tuple(dict.fromkeys([*reads, *own]))


def policy_declarations(loss: LossConfig, own: Sequence[Column] = ()) -> tuple[Declaration, ...]:
    """The policy's part and the loss's; ``own`` as in ``training_reads``."""
    scored = scored_columns(loss)
    return (
        Declaration("policy", writes=scored, reads=scoring_reads(scored, loss)),
        Declaration(f"loss_fn.kind={loss.kind}", reads=training_reads(loss, own)),
    )
