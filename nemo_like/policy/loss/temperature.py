"""Changes how a model scores within a block: at temperature 1, or with or without the entropy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from nemo_like.algorithms.logprobs import LogprobSettings


class ScoringModel(Protocol):
    """A model that scores tokens by its ``logprob_settings``."""

    logprob_settings: LogprobSettings | None  # None: a critic's model, which gives values in place of scores


@contextlib.contextmanager
def at_temperature_one(model: ScoringModel, sampling_temperature: float) -> Iterator[None]:
    """Have the model score at temperature 1, and with no token forbidden, within the block.

    The temperature in the model's settings is ``sampling_temperature`` times a factor that some models need;
    the factor stays.
    """
    own = model.logprob_settings
    assert own is not None, "values have no temperature"
    model.logprob_settings = replace(
        own, temperature=own.temperature / sampling_temperature, forbidden_ids=()
    )
    try:
        yield
    finally:
        model.logprob_settings = own


@contextlib.contextmanager
def asked_for_entropy(model: ScoringModel, *, is_asked: bool) -> Iterator[None]:
    """Have the model compute the entropy with its scores within the block if ``is_asked``, and not otherwise,
    whatever training needs."""
    own = model.logprob_settings
    if own is not None:
        model.logprob_settings = replace(own, with_entropy=is_asked)
    try:
        yield
    finally:
        model.logprob_settings = own
