"""Sections ``loss_fn`` for tests that need no whole configuration, and the losses that they name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_like.algorithms.loss_kind import loss_kind_of
from nemo_like.algorithms.losses import LossTerms, LossTokens, policy_gradient
from nemo_like.algorithms.options import LOSS_KINDS, LossConfig
from nemo_like.config import fields
from nemo_like.config.import_path import load_by_path
from nemo_like.config.keys import keys
from nemo_like.config.kind_defaults import fill_kinds


def loss_of(kind: str, own: Mapping[str, Any] | None = None, **common: Any) -> LossConfig:
    """Return the section of a kind of loss, with the defaults of all other keys.

    Of the values in ``own`` it takes those of keys that the kind has. Values are plain, as in YAML.
    """
    options = LOSS_KINDS.load(kind).options
    taken = {name: value for name, value in (own or {}).items() if name in fields.hints(options)}
    tree = {"kind": kind, **taken, **common}
    for name, (_, key) in keys(LossConfig).items():
        tree.setdefault(name, getattr(key.default, "name", key.default))
    assert fill_kinds(tree, LossConfig, lambda *_: False) == []
    loss: LossConfig = fields.typed(tree, options)
    return loss


def compute(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    """Compute the configured loss."""
    kind = loss_kind_of(cfg)
    terms: LossTerms = load_by_path(kind.function)(tokens, cfg, **kind.own_keys(cfg))
    return terms


def clipped_loss(tokens: LossTokens, cfg: Any) -> LossTerms:
    """Compute PPO's clipped surrogate, which a loss of a test's own begins with."""
    return policy_gradient(tokens, cfg, cfg.ratio_clip_min, cfg.ratio_clip_max, cfg.ratio_clip_c)
