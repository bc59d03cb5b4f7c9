"""Do trainer and engines agree on the log-probs of what was sampled?

They have the same weights, so what they disagree on is rounding. A weight that did not reach an engine,
or lies there half-loaded, shows here first: the run learns on, only worse.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from nemo_like.config.schema import Config, Device, Precision
from nemo_like.driver.run_failures import RunFailed

_METRIC = "train/token_mult_prob_error"
# Means of exp|generation - trainer log-prob| over tokens above which it is not rounding. In float32 on the
# CPU that is 1.0000003 to 1.000002, and the smallest of the mistakes tried is 1.00008.
_LIMITS = {(Device.cpu, Precision.float32): 1.00002}
_LIMIT_ELSEWHERE = 1.05
_EXPLANATION = (
    "trainer and generation engines disagree on the log-probs of what was sampled, as when a weight did not "
    "reach the engines; docs/metrics.md says what to look at"
)


def mismatch_limit(cfg: Config) -> float:
    """Return the token_mult_prob_error from which on a step is worth a warning.

    Engines and workers compute on the same device in the same precision, ``policy.device`` and
    ``policy.precision``; what a recording was sampled with is not known.
    """
    if cfg.rollout.replay is not None:
        return _LIMIT_ELSEWHERE
    return _LIMITS.get((cfg.policy.device, cfg.policy.precision), _LIMIT_ELSEWHERE)


class AgreementWatch:
    """Looks at the metrics of every step."""

    def __init__(self, cfg: Config, warn: Callable[[str], None]) -> None:
        """``warn`` gets a sentence at the first step above the limit."""
        self._limit, self._maximum = mismatch_limit(cfg), cfg.grpo.max_token_mult_prob_error
        self._where = f"{cfg.policy.precision.name} on {cfg.policy.device.name}"
        self._warn = warn
        self._has_warned = False

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Warn where this is the first step above the limit; a step that compared nothing is not looked at.

        Raises RunFailed when the error is above grpo.max_token_mult_prob_error.
        """
        error = metrics.get(_METRIC)
        if error is None:
            return
        # An error that is no number is above every limit.
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
