"""Scoring in another way than that of the sampling."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

from nemo_like.algorithms.logprobs import LogprobSettings


class ScoringModel(Protocol):
    """A model that scores tokens with these settings."""

    logprob_settings: LogprobSettings


@contextlib.contextmanager
def at_temperature_one(model: ScoringModel, sampling_temperature: float) -> Iterator[None]:
    """Have the model score at temperature 1, and with no token forbidden, within the block.

    Its settings divide logits by ``sampling_temperature``, and by a factor where the model wants one.
    """
    own = model.logprob_settings
    model.logprob_settings = replace(
        own, temperature=own.temperature / sampling_temperature, forbidden_ids=()
    )
    try:
        yield
    finally:
        model.logprob_settings = own
