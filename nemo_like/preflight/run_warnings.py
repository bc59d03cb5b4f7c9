"""Warns of what a run lacks or does that its user may not want, although no rule forbids it."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.loss_traits import is_own_loss
from nemo_like.configuration import Config
from nemo_like.policy.backends.backend_kind import backend_kind_of
from nemo_like.policy.options import Device


def missing_kernels(cfg: Config) -> Iterator[str]:
    """Yield a line for each kernel that training would use but lacks, with what that costs."""
    of_kind = backend_kind_of(cfg.policy).missing_kernels
    if of_kind is not None and cfg.policy.device is Device.cuda and not cfg.rollout.generate_only:
        yield from of_kind(cfg.policy)


def staleness_warnings(cfg: Config) -> Iterator[str]:
    """Yield a warning when samples of older weights train as if the present weights had sampled them."""
    loss = cfg.loss_fn
    is_corrected = loss.use_generation_logprobs_as_prev or loss.use_importance_sampling_correction
    if cfg.grpo.max_staleness > 0 and not (is_corrected or is_own_loss(loss)):
        yield (
            f"grpo.max_staleness={cfg.grpo.max_staleness}: samples of older weights train without a "
            "correction; loss_fn.use_importance_sampling_correction=true is recommended, with "
            "truncated_importance_sampling_type=tis and truncated_importance_sampling_ratio=2 "
            "(docs/explanation/async.md)"
        )


def code_warnings(cfg: Config) -> Iterator[str]:
    """Yield a warning when the processes of the run execute what is in their checkpoints."""
    if cfg.policy.trust_remote_code:
        yield (
            "policy.trust_remote_code=true: Python files of the checkpoints run in this run's processes, "
            "with all that you may do on these machines; read them first"
        )
