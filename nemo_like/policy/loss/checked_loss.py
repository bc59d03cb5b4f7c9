"""Checks around the loss function that ``loss_fn.kind`` names: its inputs, its results, and its gradient.

LossTokens, columns ──▶ function ──▶ LossTerms: types, shapes, names; for a user's own loss: finite values
                          backward ──▶ for a user's own loss: a finite gradient
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_like.algorithms.loss_kind import loss_kind_of
from nemo_like.algorithms.loss_traits import is_own_loss
from nemo_like.algorithms.losses import LOGGED_MEANS, LossTerms, LossTokens
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import Column, Layout, declared_by
from nemo_like.cluster.breakdown import is_out_of_memory
from nemo_like.config.import_path import load_by_path
from nemo_like.policy.loss.train_metrics import KNOWN_MEANS

# The rounding of a sum over tokens with values of about 1, relative to the sum of their weights.
_ROUNDING = 1e-6


class LossFailed(ValueError):
    """The loss raised an error, or returned something that cannot be trained on; the message says what.

    ``row`` is the position, in the worker's batch, of the sample to blame, or None where it may be any.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row

    def __reduce__(self) -> tuple[type[LossFailed], tuple[str, int | None]]:
        return type(self), (str(self), self.row)


class ReadColumns(dict[str, Any]):
    """The columns that a loss declares, by name. Another name raises a KeyError that says what to declare."""

    def __missing__(self, name: str) -> Any:
        close = get_close_matches(name, self, n=1, cutoff=0.6)
        meant = f"did you mean {close[0]!r}?" if close else "mark the loss with @reads(...) for it"
        raise KeyError(f"it does not read the column {name!r}, only {', '.join(self) or 'none'}; {meant}")


def own_reads(cfg: LossConfig) -> tuple[Column, ...]:
    """Import the configured loss, and return the columns that it declares to read besides those that its keys
    imply.

    Raises ValueError when the loss cannot be found, ColumnError when it declares something that is not a
    column.
    """
    kind = loss_kind_of(cfg)
    loss, arguments = load_by_path(kind.function), kind.own_keys(cfg)
    return declared_by(f"loss_fn.kind={cfg.kind}", loss, arguments).reads


def own_means(cfg: LossConfig) -> tuple[str, ...]:
    """Import the configured loss, and return the names of the means that it declares by ``logs``."""
    return getattr(load_by_path(loss_kind_of(cfg).function), LOGGED_MEANS, ())


class CheckedLoss:
    """Calls the function behind ``loss_fn.kind`` once per micro-batch, and checks its results."""

    def __init__(self, cfg: LossConfig, *, is_accumulated: bool = False) -> None:
        """Import the function. Raises ValueError when it cannot be found.

        With ``is_accumulated`` the results are normalised later; ``__call__`` checks that the loss allows
        that.
        """
        self._cfg, self._key, self._is_accumulated = cfg, f"loss_fn.kind={cfg.kind}", is_accumulated
        kind = loss_kind_of(cfg)
        self._arguments, self._compute = kind.own_keys(cfg), load_by_path(kind.function)
        self._known, self._reads = (*KNOWN_MEANS, *own_means(cfg)), own_reads(cfg)

    def __call__(self, tokens: LossTokens, columns: Mapping[str, Any], rows: Tensor) -> LossTerms:
        """Return the loss of the micro-batch whose n samples have the positions ``rows`` [n] int64 in the
        worker's batch.

        Raises LossFailed when the function raises an error or a check fails.
        """
        tokens = replace(tokens, columns=ReadColumns(columns))
        try:
            terms = self._compute(tokens, self._cfg, **self._arguments)
        except Exception as error:
            if is_out_of_memory(error):
                raise  # running out of memory is not the loss's fault
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
            where = f"{Path(last.filename).name}:{last.lineno}"
            raise LossFailed(f"{self._key} raised {type(error).__name__} ({where}): {text}") from error
        self._check_form(terms, tokens)
        # Testing values for being finite waits for the device, so only a user's own loss is tested.
        if is_own_loss(self._cfg):
            self._check_finite(terms, tokens, rows)
            if self._is_accumulated:
                self._check_proportional(terms, tokens)
        return terms

    def _check_form(self, terms: Any, tokens: LossTokens) -> None:
        key = self._key
        if not isinstance(terms, LossTerms) or not isinstance(terms.loss, Tensor):
            what = f"LossTerms(loss={terms.loss!r})" if isinstance(terms, LossTerms) else type(terms).__name__
            raise LossFailed(f"{key} returned {what}, not LossTerms with a tensor")
        if unknown := terms.means.keys() - set(self._known):
            raise LossFailed(
                f"{key} gives the means {sorted(unknown)}, which it does not announce; "
                f"mark it with nemo_like.algorithms.losses.logs, or choose of {', '.join(self._known)}"
            )
        per_token = {"ratio": terms.ratio, "clipped_ratio": terms.clipped_ratio}
        for name, one in terms.means.items():
            per_token |= {f"means[{name!r}].values": one.values, f"means[{name!r}].weights": one.weights}
        wrong = {name: list(one.shape) for name, one in per_token.items() if one.shape != tokens.mask.shape}
        if terms.loss.ndim or wrong:
            shapes = {"loss": list(terms.loss.shape), **wrong}
            raise LossFailed(
                f"{key} returned the shapes {shapes} for {len(tokens.mask)} tokens; the "
                "loss is a scalar, everything else has a value per token"
            )
        if len(tokens.mask) and tokens.logprobs.requires_grad and not terms.loss.requires_grad:
            raise LossFailed(f"{key} returned a loss without a gradient; compute it from tokens.logprobs")

    def _check_finite(self, terms: LossTerms, tokens: LossTokens, rows: Tensor) -> None:
        values = self._per_token(tokens)
        if not terms.loss.isfinite():
            index = _first_not_finite(terms, tokens, values)
            blamed = "" if index is None else _values_at(index, tokens, values)
            row = None if index is None else int(rows[tokens.sample_index[index]])
            raise LossFailed(f"{self._key} returned a loss of {terms.loss.item()}{blamed}", row)

        def check(what: str, gradient: Tensor) -> None:
            if (index := _first_odd_token(gradient)) is not None:
                odd = gradient[index][~gradient[index].isfinite()][0].item()
                raise LossFailed(
                    f"{self._key} gives a token's {what} a gradient of {odd}"
                    f"{_values_at(index, tokens, values)}",
                    int(rows[tokens.sample_index[index]]),
                )

        for what, given in _differentiable(tokens).items():
            given.register_hook(partial(check, what))

    @torch.no_grad()
    def _check_proportional(self, terms: LossTerms, tokens: LossTokens) -> None:
        """Raise LossFailed unless twice the weights give twice the loss, and the same means."""
        twice: LossTerms = self._compute(
            replace(tokens, weights=2 * tokens.weights), self._cfg, **self._arguments
        )
        difference = (twice.loss - 2 * terms.loss).abs()
        allowed = _ROUNDING * (10 * terms.loss.abs() + tokens.weights.sum())
        if not difference <= allowed:
            raise LossFailed(
                f"{self._key} gives {twice.loss.item():.6g} for twice the weights with which it gives "
                f"{terms.loss.item():.6g}; where an update's gradient is accumulated in parts, the loss must "
                "be the sum over tokens of tokens.weights times the token's loss, and not depend on chance"
            )
        for name, one in terms.means.items():
            if not torch.equal(one.weights, twice.means[name].weights):
                raise LossFailed(
                    f"{self._key} weighs its mean {name!r} by tokens.weights; where an update's gradient is "
                    "accumulated in parts, give TokenMean(values, tokens.mask)"
                )

    def _per_token(self, tokens: LossTokens) -> dict[str, Tensor]:
        """Return the values that the loss may have read, by name, one per token."""
        found = {
            "logprobs": tokens.logprobs.detach(),
            "prev_logprobs": tokens.prev_logprobs,
            "advantages": tokens.advantages,
        }
        for column in self._reads:
            values = tokens.columns[column.name]
            if isinstance(values, Tensor):
                is_per_token = column.layout is Layout.per_token
                found[column.name] = values if is_per_token else values[tokens.sample_index]
        return found


def _first_not_finite(terms: LossTerms, tokens: LossTokens, values: Mapping[str, Tensor]) -> int | None:
    """Return the first token to blame for a loss that is not finite, because a column or the gradient is not
    finite there; None where there is no such token."""
    gradients: Sequence[Tensor | None] = ()
    given = [*_differentiable(tokens).values()]
    if terms.loss.requires_grad and given:
        gradients = torch.autograd.grad(terms.loss, given, retain_graph=True, allow_unused=True)
    indexes = (_first_odd_token(one) for one in (*values.values(), *gradients) if one is not None)
    return next((index for index in indexes if index is not None), None)


def _differentiable(tokens: LossTokens) -> dict[str, Tensor]:
    """Return the tensors by which a loss may be differentiated, by their names in messages."""
    given = {
        "log-prob": tokens.logprobs,
        "entropy": tokens.entropy,
        "topk_logprobs": tokens.topk_logprobs,
    }
    return {name: one for name, one in given.items() if one is not None and one.requires_grad}


def _first_odd_token(values: Tensor) -> int | None:
    """Return the first token with a value in ``values`` [tokens, ...] that is not finite; None where all are
    finite."""
    if not values.is_floating_point() or values.isfinite().all():
        return None
    return int((~values.reshape(len(values), -1).isfinite().all(1)).nonzero()[0])


def _values_at(index: int, tokens: LossTokens, values: Mapping[str, Tensor]) -> str:
    """Return a text with the values that the loss read at a token, for a message."""
    number = int((tokens.sample_index[: index + 1] == tokens.sample_index[index]).sum())
    shown = ", ".join(f"{name}={_shown(one[index])}" for name, one in values.items())
    return f", at generated token {number}, where {shown}"


def _shown(value: Tensor) -> str:
    numbers: Sequence[float] = value.reshape(-1)[:4].tolist()
    texts = [f"{number:.6g}" for number in numbers]
    return texts[0] if value.ndim == 0 else f"[{', '.join(texts)}{', ...' if value.numel() > 4 else ''}]"
