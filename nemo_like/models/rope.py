"""Reads from config.json how queries and keys rotate with the position."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_like.models.family import Part
from nemo_like.models.latent_sizes import LatentSizes

# What transformers assumes when config.json has none.
USUAL_ROPE_THETA = 10000.0
# The keys of config.json, and of its rope settings, that have to be numbers where they are given.
ROPE_NUMBERS = (
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_local_base_freq",
    "rope_theta",
    "rotary_dim",
)
# The only rope scaling that Megatron-core implements: Llama 3.1's, with any factor.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """The rotation in one kind of layer: pair i of a head's d values turns by theta^(-2 i / d) a token.

    ``factor`` divides the angles: all of them, or with YaRN (arXiv 2309.00071) those of pairs that turn less
    than ``beta_slow`` times in the ``trained_length`` of a model's first training, and none of pairs that
    turn more than ``beta_fast`` times; with ``rounds`` the numbers of these pairs are whole ones.
    ``amplitude`` multiplies rotated queries, and rotated keys.
    """

    theta: float
    factor: float = 1.0
    trained_length: int | None = None  # None: no YaRN
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    rounds: bool = True
    amplitude: float = 1.0


def rope_settings(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rope settings, under the key of transformers 5 or of earlier versions; else empty."""
    return content.get("rope_parameters") or content.get("rope_scaling") or {}


def rope(content: Mapping[str, Any]) -> tuple[float, float | None] | None:
    """Return theta and the factor of Llama 3.1's scaling; the factor is None for a model without scaling.

    Returns None for another kind of scaling.
    """
    settings = _one_group(content)
    theta = float(settings["rope_theta"])
    kind = _kind(settings)
    if kind == "default":
        return theta, None
    if kind != "llama3" or any(settings.get(key) != value for key, value in _LLAMA3_ROPE.items()):
        return None
    return theta, float(settings["factor"])


def two_ropes(content: Mapping[str, Any]) -> tuple[Rope, Rope] | None:
    """Return the rotation in layers with a window, and that in layers without one, where they differ.

    Earlier versions of transformers have one group of settings, which is for layers without a window, and the
    theta of the others apart. Returns None for a kind of scaling other than YaRN's usual one and the linear
    one.
    """
    of_types = content.get("rope_parameters") or {}
    local = _rope(_with_theta(content.get("rope_local_base_freq"), of_types.get("sliding_attention")))
    of_others = {**(of_types.get("full_attention") or {}), **(content.get("rope_scaling") or {})}
    whole = _rope(_with_theta(content.get("rope_theta"), of_others))
    return None if local is None or whole is None else (local, whole)


def yarn(content: Mapping[str, Any]) -> tuple[Rope] | None:
    """Return the rotation of all layers with YaRN; None for another kind of scaling, and for none."""
    one = _rope(_one_group(content))
    return None if one is None or one.trained_length is None else (one,)


def latent_rope(content: Mapping[str, Any]) -> tuple[Rope] | None:
    """Return the rotation of latent attention: without scaling, or with YaRN, also with ``mscale``.

    Returns None for another kind of scaling, for one of YaRN's two ``mscale`` alone, and for an
    ``attention_factor`` or ``truncate``, which vLLM does not read there.
    """
    settings = _one_group(content)
    of_rotated, of_all = settings.pop("mscale", None), settings.pop("mscale_all_dim", None)
    is_known = _kind(settings) in ("default", "yarn") and settings.get("truncate", True)
    if not is_known or settings.get("attention_factor") or bool(of_rotated) is not bool(of_all):
        return None
    if of_rotated and of_all:
        factor = settings.get("factor")
        settings["attention_factor"] = yarn_mscale(factor, of_rotated) / yarn_mscale(factor, of_all)
    one = _rope(settings)
    return None if one is None else (one,)


def yarn_mscale(factor: float | None, mscale: float = 1.0) -> float:
    """Return by how much YaRN's ``factor`` raises queries, and keys, of a model with this ``mscale``."""
    return 0.1 * mscale * math.log(max(factor or 1.0, 1.0)) + 1.0


# What reads the rotations of models with such a part, and which kinds of scaling it knows.
_READERS: Mapping[Part, tuple[Callable[[Mapping[str, Any]], tuple[Rope, ...] | None], str]] = {
    Part.mla: (latent_rope, "none, or with YaRN with mscale and mscale_all_dim, or without both"),
    Part.yarn: (yarn, "YaRN without mscale"),
    Part.two_ropes: (two_ropes, "none, or with a linear one, or YaRN without mscale"),
}


def ropes_of(content: Mapping[str, Any], parts: frozenset[Part]) -> tuple[Rope, ...]:
    """Return the rotations of models with parts that have their own: one of all layers, or those of layers
    with a window and without one. Return none for other models and for unknown kinds of scaling."""
    return next((read(content) or () for part, (read, _) in _READERS.items() if part in parts), ())


def known_scaling(content: Mapping[str, Any], parts: frozenset[Part]) -> str | None:
    """Return which kinds of scaling models with these parts may have, where this one has another; else
    None."""
    read, known = next(
        (_READERS[part] for part in _READERS if part in parts), (rope, "none, or with that of Llama 3.1")
    )
    return known if read(content) is None else None


def rotated_share(content: Mapping[str, Any]) -> float:
    """Return the share of a head's values that rotate, of models whose config.json says so; ``rotary_dim`` is
    their number."""
    name = "partial_rotary_factor"
    size, rotated = content.get("head_dim"), content.get("rotary_dim")
    share = rotated / size if size and rotated else 1.0
    return float(rope_settings(content).get(name, content.get(name, share)))


def query_scale(content: Mapping[str, Any], key: str, latent: LatentSizes | None) -> float | None:
    """Return what multiplies products of queries with keys, in latent attention twice by YaRN's
    ``mscale_all_dim``, and in others by the inverse root of ``key``; None where there is no key."""
    if latent is None:
        return content[key] ** -0.5 if key else None
    settings = rope_settings(content)
    scale: float = yarn_mscale(settings.get("factor"), settings.get("mscale_all_dim") or 0.0) ** 2
    return scale * latent.head**-0.5


def _one_group(content: Mapping[str, Any]) -> dict[str, Any]:
    return _with_theta(content.get("rope_theta"), rope_settings(content))


def _with_theta(theta: float | None, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings with a theta: their own, else this one, else the usual one."""
    own = (settings or {}).get("rope_theta")
    given = next((one for one in (own, theta) if one is not None), USUAL_ROPE_THETA)
    return {**(settings or {}), "rope_theta": given}


def _rope(settings: Mapping[str, Any]) -> Rope | None:
    kind, theta = _kind(settings), float(settings["rope_theta"])
    if kind == "default":
        return Rope(theta=theta)
    factor = settings.get("factor")
    if not factor or kind not in ("linear", "yarn"):
        return None
    if kind == "linear":
        return Rope(theta=theta, factor=float(factor))
    if settings.get("mscale") or "original_max_position_embeddings" not in settings:
        return None
    return Rope(
        theta=theta,
        factor=float(factor),
        trained_length=int(settings["original_max_position_embeddings"]),
        beta_fast=float(settings.get("beta_fast") or 32),
        beta_slow=float(settings.get("beta_slow") or 1),
        rounds=bool(settings.get("truncate", True)),
        amplitude=float(settings.get("attention_factor") or yarn_mscale(factor)),
    )


def _kind(settings: Mapping[str, Any]) -> str:
    kind: str = settings.get("rope_type", settings.get("type", "default"))
    return kind
