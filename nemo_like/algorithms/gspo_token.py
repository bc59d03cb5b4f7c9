"""GSPO-token clips by the ratio of the whole sample, and lets each token have its own gradient.

r_t = sg(s) p_t / sg(p_t), with s the geometric mean of the sample's ratios (arXiv 2507.18071); the loss is
max(-A_t r_t, -A_t clip(r_t))

Where all tokens of a sample have the same advantage and weight, value and gradient equal GSPO's. They differ
where a column or a KL in the reward gives tokens advantages of their own: GSPO spreads the sum of the tokens'
gradients evenly over the sample, GSPO-token leaves each token its own gradient.
"""

from __future__ import annotations

from nemo_like.algorithms.importance_sampling import sample_means
from nemo_like.algorithms.logprobs import limited
from nemo_like.algorithms.losses import LossTerms, LossTokens, surrogate_terms
from nemo_like.algorithms.options import LossConfig


def gspo_token(
    tokens: LossTokens,
    cfg: LossConfig,
    ratio_clip_min: float,
    ratio_clip_max: float,
    ratio_clip_c: float | None,
) -> LossTerms:
    """Compute GSPO's loss with a gradient per token."""
    logprobs = tokens.logprobs.detach()
    of_sample = sample_means(logprobs - tokens.prev_logprobs, tokens.sample_index, tokens.response_lengths)
    ratio = limited(of_sample + (tokens.logprobs - logprobs)).exp()
    return surrogate_terms(ratio, tokens, cfg, ratio_clip_min, ratio_clip_max, ratio_clip_c)
