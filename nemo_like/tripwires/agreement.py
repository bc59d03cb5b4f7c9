"""Judges in every step whether trainer and engines agree on the log-probs of the sampled tokens.

Both have the same weights, so they should differ by rounding alone. When a weight did not reach an engine,
or was loaded there in part, this check shows it first: the run would go on and learn, only worse.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.policy.options import Device, PolicyConfig, Precision
from nemo_like.rollout.options import RolloutConfig
from nemo_like.tripwires.alarm import Alarm
from nemo_like.tripwires.options import DebugConfig, Tripwires

# Limits on the mean of exp|generation - trainer log-prob| over tokens; rounding alone stays below them. In
# float32 on the CPU, rounding gives 1.0000003 to 1.000002, and the smallest mistake that was tried 1.00008.
_LIMITS = {(Device.cpu, Precision.float32): 1.00002}
_LIMIT_ELSEWHERE = 1.05
# Limits on the share of expert choices that differ. In float32 on the CPU none differed in healthy runs; when
# routes stand at the wrong token or layer, most differ.
_ROUTING_LIMITS = {(Device.cpu, Precision.float32): 1e-3}
_ROUTING_LIMIT_ELSEWHERE = 0.5
_LOOK_AT = (
    "what a weight passes on its way to the engines, the prefix cache, temperature and top_p on both sides "
    "(docs/explanation/disagreement.md says more)"
)


class AgreementGroups(Protocol):
    """The config groups that decide how far trainer and engines may differ."""

    @property
    def grpo(self) -> GRPOConfig: ...
    @property
    def policy(self) -> PolicyConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def debug(self) -> DebugConfig: ...


def mismatch_limit(cfg: AgreementGroups) -> float:
    """Return the token_mult_prob_error above which a step raises an alarm.

    The limit depends on ``policy.device`` and ``policy.precision``, with which engines and workers compute. A
    replay gets the widest limit, since it does not know the device and precision of its recording.
    """
    if cfg.rollout.replay is not None:
        return _LIMIT_ELSEWHERE
    return _LIMITS.get((cfg.policy.device, cfg.policy.precision), _LIMIT_ELSEWHERE)


def agreement_alarms(error: float | None, cfg: AgreementGroups, *, has_experts: bool) -> Iterator[Alarm]:
    """Yield an alarm when ``error``, a step's token_mult_prob_error, is above its limit; None if it was not
    measured.

    An error above grpo.max_token_mult_prob_error ends the run, whatever ``debug.tripwires`` is. Where that
    key is null, an error above the narrow limit of float32 on the CPU ends the run. Elsewhere the alarm is a
    warning. With ``has_experts`` it is a warning too, since rounding may send a token to another expert,
    unless the trainer's routers replay the engines' choices. Samples of older weights must differ, so with
    grpo.max_staleness only grpo.max_token_mult_prob_error is a limit.
    """
    if error is None:
        return
    is_watched = cfg.debug.tripwires is not Tripwires.off and not cfg.grpo.max_staleness
    may_reroute = has_experts and not cfg.policy.megatron_cfg.router_replay
    maximum, limit = cfg.grpo.max_token_mult_prob_error, mismatch_limit(cfg)
    # "not <=" in place of ">": NaN counts as above every limit.
    if maximum is not None and not error <= maximum:
        over, ends_run = f"grpo.max_token_mult_prob_error={maximum:.7g}", True
    elif is_watched and not error <= limit:
        over = f"{limit:.7g} ({cfg.policy.precision.name} on {cfg.policy.device.name})"
        ends_run = maximum is None and limit < _LIMIT_ELSEWHERE and not may_reroute
    else:
        return
    yield Alarm(
        tripwire="agreement",
        wrong=(
            f"token_mult_prob_error is {error:.7g}, over {over}: trainer and generation engines disagree on "
            "the log-probs of what was sampled, as when a weight did not reach the engines"
        ),
        look_at=_LOOK_AT,
        ends_run=ends_run,
    )


def routing_alarms(share: float | None, cfg: AgreementGroups) -> Iterator[Alarm]:
    """Yield a warning when too large a ``share`` of the engines' expert choices, over tokens and layers,
    differs from the choices of the trainer's own routers; None if it was not measured.

    Where training replays the engines' routes, wrong weights of a router hardly show in the log-probs; they
    show here.
    """
    narrow = _ROUTING_LIMITS.get((cfg.policy.device, cfg.policy.precision), _ROUTING_LIMIT_ELSEWHERE)
    limit = narrow if cfg.rollout.replay is None else _ROUTING_LIMIT_ELSEWHERE
    if share is not None and not share <= limit:
        yield Alarm(
            tripwire="routing",
            wrong=(
                f"routing_disagreement is {share:.3g}, over {limit:g} ({cfg.policy.precision.name} on "
                f"{cfg.policy.device.name}): the trainer's own routers would choose other experts than the "
                "engines' did"
            ),
            look_at="the routers' weights on their way to the engines, compat/route_recorder.py",
            ends_run=False,
        )
