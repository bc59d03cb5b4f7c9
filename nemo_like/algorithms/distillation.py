"""How far a student's next-token distribution is from a teacher's, per token, as pure functions.

Of both distributions the log-probs of k tokens are known, those that the teacher finds most likely. All other
tokens count as one more outcome, the *tail*, with the probability that the k leave over. To merge outcomes
never makes a divergence larger (the data-processing inequality: Cover and Thomas, Elements of Information
Theory, section 2.8). So each value here is at least 0, at most the divergence over the whole vocabulary, and
equal to it where k is the vocabulary's size. Renormalised over the k tokens, the distributions could agree
while the student gives nearly all probability to others; here that shows in the tail.

Arguments ``teacher`` and ``student`` are log-probs of the same k different tokens, [M, k], nats; results are
[M], nats. The gradient is that of the student's distribution at the token, as in GKD (arXiv 2306.13649): what
the token does to the tokens after it is left out.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_like.algorithms.logprobs import limited

# No token that a model may sample is less likely. One that it may not sample has a log-prob of some -1e30,
# and a teacher's probability of 1e-10 times that would be no sensible loss.
_LEAST_LOGPROB = -1e4


def sampled_reverse_kl(teacher_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Estimate KL(student || teacher) from the sampled tokens' log-probs, [M]: student - teacher.

    The difference is limited to +-20 nats. Its negative is the advantage with which a policy gradient
    descends this divergence (MiniLLM, arXiv 2306.08543). A token gets its own alone, and not that of later
    tokens, as in K. Lu et al., "On-Policy Distillation" (Thinking Machines, 2025).
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
    """Return the log-probs of the k tokens and of all others together, [M, k + 1].

    The others' probability is what is left of 1, so it is as precise as the dtype is at 1 (1e-7 in float32),
    and at least that.
    """
    nearly_all = -torch.finfo(logprobs.dtype).eps
    covered = torch.logsumexp(logprobs, dim=1, keepdim=True).clamp(max=nearly_all)
    return torch.cat((logprobs.clamp(min=_LEAST_LOGPROB), torch.log(-torch.expm1(covered))), dim=1)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """Return KL(p || q) of log-probs [M, outcomes]."""
    return (p.exp() * (p - q)).sum(dim=1)
