"""Per-token divergences between a student's next-token distribution and a teacher's, as pure functions.

For both distributions the log-probs of k tokens are known: the k that the teacher finds most likely. All
other tokens count as one more outcome, the *tail*, with the rest of the probability. Merging outcomes never
makes a divergence larger (the data-processing inequality: Cover and Thomas, Elements of Information Theory,
section 2.8). So each value here is at least 0, at most the divergence over the whole vocabulary, and equal to
it where k is the vocabulary's size. If both were renormalised over the k tokens, they could agree while the
student gives nearly all probability to other tokens; here the tail shows that.

Arguments ``teacher`` and ``student`` are log-probs of the same k different tokens, [M, k], nats; results are
[M], nats. The gradient flows through the student's distribution at the token alone, as in GKD (arXiv
2306.13649): the effect of the sampled token on later tokens is left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_like.algorithms.logprobs import limited

# No token that a model may sample is less likely. A token that it may not sample has a log-prob near -1e30,
# and even a teacher's probability of 1e-10 times that would be an absurd loss.
_LEAST_LOGPROB = -1e4


def sampled_reverse_kl(teacher_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Estimate KL(student || teacher) from the sampled tokens' log-probs, [M]: student - teacher.

    The difference is limited to +-20 nats. Its negative is the advantage with which a policy gradient
    descends this divergence (MiniLLM, arXiv 2306.08543). A token's advantage leaves out the differences at
    later tokens, as in K. Lu et al., "On-Policy Distillation" (Thinking Machines, 2025).
    """
    return limited(logprobs - teacher_logprobs)


def forward_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute KL(teacher || student), which asks the student to cover all that the teacher may say."""
    return _kl(_with_tail(teacher), _with_tail(student))


def reverse_kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Compute KL(student || teacher), which asks the student to say nothing that the teacher would not."""
    return _kl(_with_tail(student), _with_tail(teacher))


def jensen_shannon(teacher: Tensor, student: Tensor, beta: float) -> Tensor:
    """Compute the generalised Jensen-Shannon divergence of GKD (arXiv 2306.13649), 0 < beta < 1.

    JSD = beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student. It is
    bounded by log 2. As beta goes to 0, JSD / beta goes to the forward KL; as beta goes to 1,
    JSD / (1 - beta) goes to the reverse KL.
    """
    teacher, student = _with_tail(teacher), _with_tail(student)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _with_tail(logprobs: Tensor) -> Tensor:
    """Append the log-prob of the tail, of all other tokens together: [M, k + 1].

    The tail's probability is 1 minus the sum over the k tokens, so its precision is the dtype's epsilon
    (1e-7 in float32), which is also its least value.
    """
    nearly_all = -torch.finfo(logprobs.dtype).eps
    covered = torch.logsumexp(logprobs, dim=1, keepdim=True).clamp(max=nearly_all)
    return torch.cat((logprobs.clamp(min=_LEAST_LOGPROB), torch.log(-torch.expm1(covered))), dim=1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of log-probs [M, outcomes]."""
    return (p.exp() * (p - q)).sum(dim=1)
