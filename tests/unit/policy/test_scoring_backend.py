from __future__ import annotations

from types import SimpleNamespace

import pytest

from nemo_like.algorithms.logprobs import LogprobSettings
from nemo_like.policy.backends.scoring_backend import at_temperature_one, scoring_entropy


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


@pytest.mark.parametrize("is_trained_with_it", [False, True])
@pytest.mark.parametrize("is_wanted", [False, True])
def test_scoring_gives_the_entropy_where_it_is_asked_for_and_not_where_training_has_it(
    is_trained_with_it: bool, is_wanted: bool
) -> None:
    settings = LogprobSettings(temperature=0.5, with_entropy=is_trained_with_it, top_k=2)
    model = SimpleNamespace(logprob_settings=settings)
    with pytest.raises(RuntimeError), scoring_entropy(model, is_wanted=is_wanted):
        asked = LogprobSettings(temperature=0.5, with_entropy=is_wanted, top_k=2)
        assert model.logprob_settings == asked
        raise RuntimeError
    assert model.logprob_settings is settings


def test_a_model_that_gives_values_has_no_entropy() -> None:
    model = SimpleNamespace(logprob_settings=None)
    with scoring_entropy(model, is_wanted=False):
        assert model.logprob_settings is None
