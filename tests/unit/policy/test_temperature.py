from __future__ import annotations

from types import SimpleNamespace

import pytest

from nemo_like.algorithms.logprobs import LogprobSettings
from nemo_like.policy.temperature import at_temperature_one


def test_the_models_own_factor_stays_when_the_temperature_is_one() -> None:
    # The sampling's 0.5, and logits that the model multiplies by 4.
    model = SimpleNamespace(logprob_settings=LogprobSettings(temperature=0.125))
    with at_temperature_one(model, 0.5):
        assert model.logprob_settings.temperature == 0.25
    assert model.logprob_settings.temperature == 0.125


def test_it_is_put_back_after_an_error() -> None:
    model = SimpleNamespace(logprob_settings=LogprobSettings(temperature=0.5))
    with pytest.raises(RuntimeError), at_temperature_one(model, 0.5):
        raise RuntimeError
    assert model.logprob_settings.temperature == 0.5


def test_no_token_is_forbidden_meanwhile() -> None:
    model = SimpleNamespace(logprob_settings=LogprobSettings(temperature=1.0, forbidden_ids=(7,)))
    with at_temperature_one(model, 1.0):
        assert model.logprob_settings.forbidden_ids == ()
    assert model.logprob_settings.forbidden_ids == (7,)
