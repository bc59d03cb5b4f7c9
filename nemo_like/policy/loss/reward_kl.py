"""The KL to the reference as a part of the reward, token by token (REINFORCE++, arXiv 2501.03262).

    scoring     K_t per token ──▶ its sum and sum of squares per sample, as tags
    driver      rewards and these sums ──▶ advantage per sample, kl_scale
    training    advantage - kl_scale * K_t per token

The two sums let the driver whiten advantages over tokens that it never sees.
"""

from __future__ import annotations

from torch import Tensor

from nemo_like.algorithms.losses import kl_to_go, kl_to_reference
from nemo_like.algorithms.options import KLType
from nemo_like.batch.columns import PREV_LOGPROBS, REFERENCE_LOGPROBS, RESPONSE_MASK
from nemo_like.batch.tags import KL_SQUARE_SUM, KL_SUM
from nemo_like.policy.batch.policy_batch import PolicyBatch


def reward_kl(batch: PolicyBatch, kind: KLType) -> Tensor:
    """Compute K_t: KL(prev || reference) summed over response token t and the response tokens after it.

    The result is packed [sum of lengths] float32, in nats, 0 where no response token follows; it is on the
    batch's device and has no gradient.
    """
    prev, reference = batch.columns[PREV_LOGPROBS.name], batch.columns[REFERENCE_LOGPROBS.name]
    mask = batch.columns[RESPONSE_MASK.name].to(prev.device)
    kl = kl_to_reference(prev, reference, kind)
    return kl_to_go(kl.masked_fill(mask == 0, 0.0), batch.lengths.to(prev.device))


def reward_kl_tags(batch: PolicyBatch, kind: KLType) -> dict[str, list[float]]:
    """Compute tags kl_to_go_sum and kl_to_go_square_sum: the sums of K_t and of its square over each sample's
    response tokens."""
    mask = batch.columns[RESPONSE_MASK.name]
    to_go = reward_kl(batch, kind).cpu().double().masked_fill(mask == 0, 0.0)
    return {
        KL_SUM.name: batch.sum_per_sample(to_go).tolist(),
        KL_SQUARE_SUM.name: batch.sum_per_sample(to_go.square()).tolist(),
    }
