"""Says where an engine and a trainer differ by more than rounding, from what both computed.

The trainer computed every module on the engine's own values (``substitution``), so each point is judged by
itself. A gap at a point is rounding up to

    _SLACK x (s + a x sqrt(n)) x (largest value of the token, or the root mean square of all tokens)

where s is the unit roundoff in which values are stored, the coarser of the two sides, a is the unit roundoff
of float32, in which sums are kept, and n says how long the sums are, and what enlarges their errors:

    linear      the number of inputs
    norm        4: its sum has one sign, and errors of its terms cancel
    attention   (tokens so far) + (head size) x (largest score)^2, since a score's error is one of an exponent
    rotation    (position)^2: the angle's error grows with the position
    experts     the number of inputs of both of their layers
    all others  0
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.mismatch.points import LOGPROBS, Law, Point, in_order, point

_UNIT_ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_SUMS = _UNIT_ROUNDOFF["float32"]
_SLACK = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What of the model decides how far rounding may go."""

    head_size: int
    num_heads: int
    num_kv_heads: int
    intermediate_size: int  # of an expert, in a mixture
    num_experts_per_token: int  # 0: no mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A point at which both differ by more than rounding."""

    name: str
    excess: float  # the largest gap in units of what rounding may give
    first_position: int
    num_positions: int  # that differ
    num_compared: int
    heads: tuple[int, ...] = ()  # that differ, where some do not
    experts: tuple[int, ...] = ()  # that all differing tokens chose


@dataclass(frozen=True, slots=True)
class Compared:
    """What was compared: each point with its largest gap in units of what rounding may give."""

    excess: dict[str, float]
    findings: tuple[Finding, ...]


def compared(
    engine: Mapping[str, np.ndarray],
    trainer: Mapping[str, np.ndarray],
    dtypes: Sequence[str],
    sizes: Sizes,
    logit_sizes: np.ndarray,
) -> Compared:
    """Compare what an engine computed, [T, width] by point, with what the trainer computed from it.

    ``dtypes`` are those in which the two compute; ``logit_sizes`` [T] has the largest |logit| of each token.
    """
    stored = max(_UNIT_ROUNDOFF[dtype] for dtype in dtypes)
    chosen = _choices(engine, trainer, sizes)
    excess, findings = {}, []
    for one in in_order(engine.keys() & trainer.keys()):
        given, own = engine[one.name].astype(np.float64), trainer[one.name].astype(np.float64)
        size = logit_sizes if one.name == LOGPROBS else np.abs(given).max(axis=1)
        scale = np.maximum(size, np.sqrt(np.square(given).mean()))
        bound = _SLACK * (stored + _SUMS * np.sqrt(_sum_length(one, engine, sizes))) * scale
        gaps = np.abs(given - own)
        if one.layer in chosen and one.kind.law is Law.experts:
            gaps = np.where(chosen[one.layer].agree[:, None], gaps, 0.0)
        # Not ">": NaN counts as a difference. A bound of 0 allows none.
        differs = np.logical_not(gaps <= bound[:, None])
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(differs | (gaps > 0), gaps / bound[:, None], 0.0)
        excess[one.name] = float(np.nan_to_num(ratio, nan=np.inf).max())
        if differs.any():
            findings.append(_finding(one, differs, excess[one.name], sizes, chosen))
    return Compared(excess, tuple(findings))


@dataclass(frozen=True, slots=True)
class _Choices:
    """The experts of a layer that each token chose, [T, k], and on which tokens both sides agree, [T]."""

    experts: np.ndarray
    agree: np.ndarray


def _choices(
    engine: Mapping[str, np.ndarray], trainer: Mapping[str, np.ndarray], sizes: Sizes
) -> dict[int | None, _Choices]:
    found: dict[int | None, _Choices] = {}
    for name in engine.keys() & trainer.keys():
        one = point(name)
        if one.kind.law is Law.experts:
            gate = one.beside("mlp.gate")
            if gate not in engine or gate not in trainer:
                continue
            best = [
                np.sort(np.argsort(-side[gate], axis=1)[:, : sizes.num_experts_per_token], axis=1)
                for side in (engine, trainer)
            ]
            found[one.layer] = _Choices(best[0], (best[0] == best[1]).all(axis=1))
    return found


def _sum_length(one: Point, engine: Mapping[str, np.ndarray], sizes: Sizes) -> float | np.ndarray:
    """Return n of the bound; for attention and rotation by position, [T]."""
    law, positions = one.kind.law, np.arange(len(engine[one.name]), dtype=np.float64)
    if law is Law.linear:
        return _width(engine, one.source, one.name)
    if law is Law.norm:
        return 4
    if law is Law.rotation:
        return np.square(positions)
    if law is Law.experts:
        return _width(engine, one.beside("post_attention_layernorm"), one.name) + sizes.intermediate_size
    if law is Law.attention:
        names = [one.beside(f"self_attn.rotated_{name}") for name in "qk"]
        if not engine.keys() >= {*names}:
            return positions + 1
        query, key = (_head_norms(engine[name], sizes) for name in names)
        score = query.max(axis=1) * np.maximum.accumulate(key.max(axis=1)) / sizes.head_size**0.5
        return positions + 1 + sizes.head_size * np.square(score)
    return 0


def _width(engine: Mapping[str, np.ndarray], name: str, otherwise: str) -> int:
    """Return the width of a point, or of another one where a model has no such point."""
    return engine[name if name in engine else otherwise].shape[1]


def _head_norms(values: np.ndarray, sizes: Sizes) -> np.ndarray:
    heads = values.astype(np.float64).reshape(len(values), -1, sizes.head_size)
    norms: np.ndarray = np.sqrt(np.square(heads).sum(axis=2))
    return norms


def _finding(
    one: Point, differs: np.ndarray, excess: float, sizes: Sizes, chosen: Mapping[int | None, _Choices]
) -> Finding:
    rows: np.ndarray = np.asarray(differs.any(axis=1))
    heads: tuple[int, ...] = ()
    experts: tuple[int, ...] = ()
    if one.kind.by_head and differs.shape[1] % sizes.head_size == 0:
        by_head = differs.any(axis=0).reshape(-1, sizes.head_size).any(axis=1)
        heads = () if by_head.all() else tuple(np.flatnonzero(by_head).tolist())
    if one.layer in chosen and one.kind.law is Law.experts:
        experts = _blamed(chosen[one.layer], rows)
    return Finding(
        name=one.name,
        excess=excess,
        first_position=int(np.flatnonzero(rows)[0]),
        num_positions=int(rows.sum()),
        num_compared=len(rows),
        heads=heads,
        experts=experts,
    )


def _blamed(choices: _Choices, rows: np.ndarray) -> tuple[int, ...]:
    """Return the experts without which no token differs: those whose tokens all differ."""
    used = set(choices.experts[choices.agree].ravel().tolist())
    innocent = set(choices.experts[choices.agree & ~rows].ravel().tolist())
    return tuple(sorted(used - innocent))


def stale_weights(
    held: Mapping[str, int], trainer: Mapping[str, int], earlier: Mapping[int, Mapping[str, int]]
) -> Iterator[tuple[str, int | None]]:
    """Yield the name of each weight that differs, and of which earlier version the engine has it; None if of
    none that is known.

    All are digests by name: those that the engine holds, those of the trainer, and those of the trainer at
    earlier versions.
    """
    for name, word in held.items():
        expected = trainer.get(name)
        if name == "lm_head.weight" and expected is None:  # tied
            expected = trainer.get("model.embed_tokens.weight")
        if expected is None or word == expected:
            continue
        source = "model.embed_tokens.weight" if name not in trainer else name
        versions = [version for version, words in earlier.items() if words.get(source) == word]
        yield name, max(versions, default=None)
