"""``LossKind``: the description of a kind of loss; each kind is one file that makes one.

loss_kinds/cispo.py    KIND = LossKind(about=..., options=ClippedLossConfig, function="module:name")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

from nemo_like.algorithms.options import LOSS_KINDS, LossConfig, SurrogateLossConfig
from nemo_like.config.fields import hints
from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind:
    """A kind of loss.

    about: its name in the field, with its paper. options: the class of ``loss_fn``, a ``LossConfig`` with the
    kind's own keys added. function: import path of ``(tokens, cfg, **own keys) -> LossTerms``. reference:
    import path of its ``tripwires.reference_loss.Surrogate``; None: tripwires cannot compute this loss anew.
    problems: yields every problem with its keys that exclude each other or have no effect. has_sample_ratio:
    one ratio for a whole sample, in place of one per token. spreads_gradient: the gradient of a sample is
    spread evenly over its tokens. cuts_ratio: its clipped ratio is the ratio cut at ratio_clip_min and
    ratio_clip_max. has_teacher: it compares with a teacher.
    """

    about: str
    options: type
    function: str
    reference: str | None = None
    problems: Callable[[Any], Iterator[Problem]] | None = None
    has_sample_ratio: bool = False
    spreads_gradient: bool = False
    cuts_ratio: bool = False
    has_teacher: bool = False

    @property
    def is_function(self) -> bool:
        """Whether it is a user's own plain function, of which nothing is known."""
        return self.options is OwnLossConfig

    def own_keys(self, cfg: LossConfig) -> Mapping[str, Any]:
        """Return the keyword arguments of the loss function: the kind's own keys, or
        ``loss_fn.arguments``."""
        if self.is_function:
            return cfg.arguments
        common = hints(LossConfig)
        return {name: getattr(cfg, name) for name in hints(self.options) if name not in common}


@dataclass(kw_only=True, slots=True)
class OwnLossConfig(SurrogateLossConfig):
    """The keys that a function of the user's may read."""

    sequence_level_importance_ratios: Annotated[
        bool, Key("one ratio per sample; needs token_level_loss=false", False)
    ]


@cache
def own_loss(path: str) -> LossKind:
    """Return the kind for a user's own function, with the defaults for all that is unknown of it."""
    return LossKind(about="a function of your own", options=OwnLossConfig, function=path)


def loss_kind_of(loss: LossConfig) -> LossKind:
    """Return the configured kind of loss."""
    kind: LossKind = LOSS_KINDS.load(loss.kind)
    return kind
