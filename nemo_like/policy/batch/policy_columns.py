"""The columns that the policy's and the critic's phases, and the loss, write and read.

Standard library only, since a configuration is checked with it before anything heavy is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.algorithms.loss_traits import (
    punishes_messages,
    reads_generation_logprobs,
    scores_prev_logprobs,
    trains_on_entropy,
)
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    ENTROPIES,
    GENERATION_LOGPROBS,
    IMAGE_COLUMNS,
    INPUT_IDS,
    MESSAGE_FLAGS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_MASK,
    VALUE_COLUMNS,
    Column,
    Declaration,
)
from nemo_like.batch.routed_experts import replayed_columns
from nemo_like.models.model_info import has_vision_tower
from nemo_like.policy.options import PolicyConfig
from nemo_like.rollout.options import RolloutConfig, dumps_all_of


def scored_columns(loss: LossConfig) -> tuple[Column, ...]:
    """Return the columns of log-probs, and of entropies where these choose tokens, that the trainer computes
    before training, because the loss reads them."""
    columns = [PREV_LOGPROBS] if scores_prev_logprobs(loss) else []
    if loss.reference_policy_kl_penalty > 0:
        columns.append(REFERENCE_LOGPROBS)
    if trains_on_entropy(loss):
        columns.append(ENTROPIES)
    return tuple(columns)


def dumped_columns(loss: LossConfig, rollout: RolloutConfig) -> tuple[Column, ...]:
    """Return the columns that the trainer computes only for dumps of rollouts.

    These are the entropies, which come from the same pass as prev_logprobs. A run without this pass, or
    without dumps of all samples, has none: an excerpt is not worth the time of a whole step.
    """
    is_extra = scores_prev_logprobs(loss) and not trains_on_entropy(loss)
    return (ENTROPIES,) if rollout.dump_period > 0 and is_extra else ()


def scored_in_step(step: int, loss: LossConfig, rollout: RolloutConfig) -> tuple[Column, ...]:
    """Return the columns that the log-prob phase of training step ``step`` writes."""
    further = dumped_columns(loss, rollout) if dumps_all_of(step, rollout) else ()
    return (*scored_columns(loss), *further)


def model_reads(policy: PolicyConfig) -> tuple[Column, ...]:
    """Return the columns that the policy's model reads besides tokens."""
    images = IMAGE_COLUMNS if has_vision_tower(policy.model_name) else ()
    return (*images, *replayed_columns(policy))


def scoring_reads(
    columns: Sequence[Column], loss: LossConfig, model: Sequence[Column] = ()
) -> tuple[Column, ...]:
    """Return the columns that a log-prob phase reads to compute ``columns`` and their tags; ``model`` has the
    result of ``model_reads``."""
    reads = [INPUT_IDS, RESPONSE_MASK, *model]
    if PREV_LOGPROBS in columns:
        reads.append(GENERATION_LOGPROBS)
    elif columns and loss.use_kl_in_reward:
        reads.append(PREV_LOGPROBS)
    return tuple(reads)


def training_reads(
    loss: LossConfig, own: Sequence[Column] = (), model: Sequence[Column] = ()
) -> tuple[Column, ...]:
    """Return the columns that training reads; ``own`` has further columns of the user's own loss, ``model``
    the result of ``model_reads``."""
    reads = [INPUT_IDS, RESPONSE_MASK, *model, *scored_columns(loss)]
    if reads_generation_logprobs(loss):
        reads.append(GENERATION_LOGPROBS)
    if punishes_messages(loss):
        reads.append(MESSAGE_FLAGS)
    return tuple(dict.fromkeys([*reads, *own]))


def policy_declarations(
    loss: LossConfig,
    own: Sequence[Column] = (),
    model: Sequence[Column] = (),
    dumped: Sequence[Column] = (),
) -> tuple[Declaration, ...]:
    """Return the declarations of the policy and of the loss.

    ``own`` has further columns of the user's own loss, ``model`` the result of ``model_reads``, and
    ``dumped`` the result of ``dumped_columns``.
    """
    scored = scored_columns(loss)
    return (
        Declaration("policy", writes=(*scored, *dumped), reads=scoring_reads(scored, loss, model)),
        Declaration(f"loss_fn.kind={loss.kind}", reads=training_reads(loss, own)),
    )


def kl_reads(loss: LossConfig) -> tuple[Column, ...]:
    """Return the columns that a critic reads for the KL term of a reward; none where the reward has none."""
    return (PREV_LOGPROBS, REFERENCE_LOGPROBS) if loss.use_kl_in_reward else ()


def value_declarations(loss: LossConfig, inputs: Sequence[Column] = ()) -> tuple[Declaration, ...]:
    """Return the declaration of a critic; ``loss`` is the policy's loss, ``inputs`` are further columns that
    it reads."""
    reads = (INPUT_IDS, RESPONSE_MASK, *inputs, *kl_reads(loss))
    return (Declaration("value", writes=VALUE_COLUMNS, reads=reads),)
