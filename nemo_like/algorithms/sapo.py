"""SAPO replaces PPO's clip by a gate that closes softly (arXiv 2511.20347).

f(r) = 4 / tau * sigmoid(tau (r - 1)), with tau_pos where A > 0 and tau_neg elsewhere; the loss is -A f(r)

A token's gradient is REINFORCE's times r times 4 p (1 - p), with p = sigmoid(tau (r - 1)). The last factor is
1 at r = 1, and smaller the further r is from 1 on either side.
"""

from __future__ import annotations

import torch

from nemo_like.algorithms.losses import LossTerms, LossTokens, loss_terms, policy_ratio
from nemo_like.algorithms.options import LossConfig


def sapo(tokens: LossTokens, cfg: LossConfig, tau_pos: float, tau_neg: float) -> LossTerms:
    """Compute the softly gated loss.

    Nothing is clipped, so metrics get the ratio as the clipped ratio too.
    """
    ratio = policy_ratio(tokens, cfg)
    tau = torch.where(tokens.advantages > 0, tau_pos, tau_neg)
    x = tau * (ratio - 1)
    # For p near 1, float32 keeps few digits of 1 - p, to which the gradient is proportional.
    p = torch.where(x > 0, 1 - torch.sigmoid(-x), torch.sigmoid(x))
    gate = p * 4 / tau
    return loss_terms(-tokens.advantages * gate, ratio, ratio, tokens, cfg)
