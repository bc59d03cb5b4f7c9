"""A check in every step that trainer and engines agree on the log-probs of the sampled tokens.

Both have the same weights, so they should differ by rounding alone. When a weight did not reach an engine,
or was loaded there in part, this check shows it first: the run would go on and learn, only worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_like.config.schema import Config, Device, Precision
from nemo_like.driver.run_failures import RunFailed

_METRIC = "train/token_mult_prob_error"
# Limits on the mean of exp|generation - trainer log-prob| over tokens; rounding alone stays below them. In
# float32 on the CPU, rounding gives 1.0000003 to 1.000002, and the smallest of the mistakes tried 1.00008.
_LIMITS = {(Device.cpu, Precision.float32): 1.00002}
_LIMIT_ELSEWHERE = 1.05
_EXPLANATION = (
    "trainer and generation engines disagree on the log-probs of what was sampled, as when a weight did not "
    "reach the engines; docs/metrics.md says what to look at"
)


def mismatch_limit(cfg: Config) -> float:
    """Return the token_mult_prob_error above which a step is worth a warning.

    The limit depends on ``policy.device`` and ``policy.precision``, with which engines and workers compute. A
    replay gets the widest limit, since nobody knows what its recording was sampled with.
    """
    if cfg.rollout.replay is not None:
        return _LIMIT_ELSEWHERE
    return _LIMITS.get((cfg.policy.device, cfg.policy.precision), _LIMIT_ELSEWHERE)


class AgreementWatch:
    """Compares the token_mult_prob_error of every step with a limit to warn at and one to stop at, if set."""

    def __init__(self, cfg: Config, warn: Callable[[str], None]) -> None:
        """Take the limits from ``cfg``; ``warn`` gets a sentence at the first step whose error is above
        ``mismatch_limit``."""
        self._limit, self._maximum = mismatch_limit(cfg), cfg.grpo.max_token_mult_prob_error
        self._where = f"{cfg.policy.precision.name} on {cfg.policy.device.name}"
        self._warn = warn
        self._has_warned = False

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn if this is the first step above the limit; ignore a step whose metrics lack the error.

        Raises RunFailed when the error is above grpo.max_token_mult_prob_error.
        """
        error = metrics.get(_METRIC)
        if error is None:
            return
        # "not <=" in place of ">": NaN counts as above every limit.
        if self._maximum is not None and not error <= self._maximum:
            raise RunFailed(
                f"{self._described(error, step)}, over grpo.max_token_mult_prob_error={self._maximum:.7g}: "
                f"{_EXPLANATION}. The step is in no checkpoint"
            )
        if not error <= self._limit and not self._has_warned:
            self._has_warned = True
            self._warn(
                f"{self._described(error, step)}, over {self._limit:.7g} ({self._where}): {_EXPLANATION}"
            )

    def _described(self, error: float, step: int) -> str:
        return f"token_mult_prob_error is {error:.7g} at step {step}"
