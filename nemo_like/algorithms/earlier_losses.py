"""Translates earlier keys of ``loss_fn``: switches that kinds replaced, arguments that became keys."""

from __future__ import annotations

from typing import Any

from nemo_like.algorithms.options import LOSS_KINDS
from nemo_like.config.fields import hints
from nemo_like.config.kinds import EarlierKeys

_SWITCHES = {
    "disable_ppo_ratio": "reinforce",
    "use_cispo": "cispo",
    "sequence_level_importance_ratios": "gspo",
}
# The kinds whose arguments are their own keys now.
_HAD_ARGUMENTS = ("sapo", "distillation")


def _with_kind(loss: dict[str, Any]) -> list[str]:
    """Replace earlier switches and arguments in the values of ``loss_fn``, and return a note for each. A
    switch that is off is removed. A second switch that is on stays, and is then reported as an unknown
    key."""
    notes: list[str] = []
    kind, is_earlier = loss.get("kind"), not _SWITCHES.keys().isdisjoint(loss)
    is_own = isinstance(kind, str) and ":" in kind
    for switch, meant in _SWITCHES.items():
        if is_own and switch == "sequence_level_importance_ratios":
            continue
        if loss.get(switch) is False:
            del loss[switch]
        elif loss.get(switch) is True and (written := _written(loss, meant)):
            del loss[switch]
            notes.append(f"loss_fn.{switch}=true is now {written}")
    if kind in _HAD_ARGUMENTS and (arguments := loss.get("arguments")):
        loss["arguments"] = {}
        for name, value in arguments.items():
            now = loss.setdefault(name, value)
            is_left_out = "" if now == value else f", which is {now}, so that {value} is left out"
            notes.append(f"loss_fn.arguments.{name} is now loss_fn.{name}{is_left_out}")
    if is_earlier and not is_own:
        _drop_clip(loss)
    return notes


def _drop_clip(loss: dict[str, Any]) -> None:
    """Remove the clip's keys where the kind has none, since earlier values had them beside every kind. A dual
    clip that was set stays, and is then reported as an unknown key."""
    own = hints(LOSS_KINDS.load(loss["kind"]).options) if loss["kind"] in LOSS_KINDS.names() else {}
    for name in ("ratio_clip_min", "ratio_clip_max", "ratio_clip_c"):
        has_effect = name == "ratio_clip_c" and loss.get(name) is not None
        if own and name not in own and not has_effect:
            loss.pop(name, None)


def _written(loss: dict[str, Any], meant: str) -> str:
    """Set the kind that a switch meant, and return the new key=value; "" where another kind excludes it."""
    if loss["kind"] == "distillation" and loss.get("policy_loss", "policy_gradient") == "policy_gradient":
        loss["policy_loss"] = meant
        return f"loss_fn.policy_loss={meant}"
    if (loss["kind"], meant) == ("gspo_token", "gspo"):
        return "a part of loss_fn.kind=gspo_token"
    if loss["kind"] == "policy_gradient":
        loss["kind"] = meant
        return f"loss_fn.kind={meant}"
    return ""


EARLIER = EarlierKeys({**dict.fromkeys(_SWITCHES, bool)}, _with_kind)
