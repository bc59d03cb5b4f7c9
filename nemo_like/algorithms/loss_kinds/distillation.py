"""On-policy distillation: the student samples, and a teacher gives the log-probs of each token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from nemo_like.algorithms.loss_kind import LossKind
from nemo_like.algorithms.options import LOSS_KINDS, SurrogateLossConfig
from nemo_like.config.fields import hints
from nemo_like.config.keys import Key, keys
from nemo_like.config.problems import Problem

_DIVERGENCES = ("reverse", "reverse_topk", "forward", "jensen_shannon")


@dataclass(kw_only=True, slots=True)
class DistillationConfig(SurrogateLossConfig):
    """How far the student is from its teacher, and how much rewards count beside that."""

    divergence: Annotated[
        str,
        Key(
            "reverse: of the sampled tokens; reverse_topk, forward, jensen_shannon: of top_k tokens",
            "reverse",
        ),
    ]
    weight: Annotated[
        float,
        Key(
            "of the divergence",
            1.0,
            above=0,
            below=math.inf,
            remedy="1 is usual; without a teacher use loss_fn.kind=policy_gradient",
        ),
    ]
    reward_weight: Annotated[
        float,
        Key(
            "of the loss by rewards",
            0.0,
            at_least=0,
            below=math.inf,
            remedy="0 learns from the teacher alone, 1 from rewards as well",
        ),
    ]
    policy_loss: Annotated[
        str,
        Key(
            "the loss by rewards, and with reverse of the divergence: a kind with no other keys",
            "policy_gradient",
        ),
    ]
    beta: Annotated[
        float,
        Key("of jensen_shannon", 0.5, above=0, below=1, remedy="0.5 is the symmetric divergence"),
    ]
    top_k: Annotated[
        int, Key("the teacher's most likely tokens that are compared", 32, at_least=1, remedy="32 is usual")
    ]


def _problems(loss: DistillationConfig) -> Iterator[Problem]:
    divergence, known = loss.divergence, _policy_losses()
    if divergence not in _DIVERGENCES:
        yield Problem(
            key=f"loss_fn.divergence={divergence}",
            rule=f"must be one of {', '.join(_DIVERGENCES)}",
            remedy="reverse needs the teacher's log-prob of the sampled token alone",
        )
        return
    if loss.policy_loss not in known:
        yield Problem(
            key=f"loss_fn.policy_loss={loss.policy_loss}",
            rule=f"must be one of {', '.join(known)}",
            remedy="policy_gradient is PPO's clipped surrogate",
        )
        return
    if divergence == "reverse" and loss.top_k != keys(DistillationConfig)["top_k"][1].default:
        yield Problem(
            key=f"loss_fn.top_k={loss.top_k}",
            rule="has no effect with divergence=reverse, which compares the sampled tokens",
            remedy="leave it out, or choose reverse_topk",
        )
    if divergence != "jensen_shannon" and loss.beta != keys(DistillationConfig)["beta"][1].default:
        yield Problem(
            key=f"loss_fn.beta={loss.beta}",
            rule=f"has no effect with divergence={divergence}",
            remedy="leave it out, or choose jensen_shannon",
        )
    if divergence == "reverse" and known[loss.policy_loss].spreads_gradient:
        yield Problem(
            key=f"loss_fn.policy_loss={loss.policy_loss}",
            rule="spreads the gradient evenly over a sample, and divergence=reverse gives each token its own",
            remedy="choose another, or reverse_topk with reward_weight above 0",
        )
    if loss.ratio_clip_c is not None and not issubclass(known[loss.policy_loss].options, SurrogateLossConfig):
        yield Problem(
            key=f"loss_fn.ratio_clip_c={loss.ratio_clip_c:g}",
            rule=f"bounds a loss that loss_fn.policy_loss={loss.policy_loss} replaces",
            remedy="set it to null",
        )
    if divergence != "reverse" and loss.reward_weight == 0:
        yield from _without_policy_gradient(loss)


def _without_policy_gradient(loss: DistillationConfig) -> Iterator[Problem]:
    chosen: dict[str, tuple[bool, str]] = {
        f"policy_loss={loss.policy_loss}": (loss.policy_loss != "policy_gradient", "policy_gradient"),
        "use_importance_sampling_correction=true": (loss.use_importance_sampling_correction, "false"),
        f"ratio_clip_c={loss.ratio_clip_c}": (loss.ratio_clip_c is not None, "null"),
    }
    for key, (is_chosen, neutral) in chosen.items():
        if is_chosen:
            yield Problem(
                key=f"loss_fn.{key}",
                rule=f"has no effect with divergence={loss.divergence} and reward_weight=0, which leave no "
                "policy gradient",
                remedy=f"set it to {neutral}, or loss_fn.reward_weight above 0",
            )


def _policy_losses() -> dict[str, LossKind]:
    """Return, by name, the shipped kinds whose keys are all keys of a distillation too."""
    own = hints(DistillationConfig).keys()
    kinds: dict[str, LossKind] = {name: LOSS_KINDS.load(name) for name in LOSS_KINDS.names()}
    return {
        name: kind
        for name, kind in kinds.items()
        if not kind.has_teacher and hints(kind.options).keys() <= own
    }


KIND = LossKind(
    about="on-policy distillation",
    options=DistillationConfig,
    function="nemo_like.policy.loss.distillation_loss:distillation",
    problems=_problems,
    has_teacher=True,
)
