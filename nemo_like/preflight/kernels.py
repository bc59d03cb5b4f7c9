"""Says which kernels a GPU run lacks, because a package is missing or no kernel serves its precision."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.configuration import Config
from nemo_like.policy.backends.backend_kind import backend_kind_of
from nemo_like.policy.options import Device


def missing_kernels(cfg: Config) -> Iterator[str]:
    """Yield a line for each kernel that training would use but lacks, with what that costs."""
    of_kind = backend_kind_of(cfg.policy).missing_kernels
    if of_kind is not None and cfg.policy.device is Device.cuda and not cfg.rollout.generate_only:
        yield from of_kind(cfg.policy)
