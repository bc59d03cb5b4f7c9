from __future__ import annotations

import pytest

from nemo_like.rollout.components import component_tags

REWARDS = [{"correct": 1.0, "format": 0.5}, {"correct": 0.0}, {}]


def test_asked_components_become_tags_with_zero_where_a_sample_has_none() -> None:
    assert component_tags(["format"], REWARDS) == {"reward/format": [0.5, 0.0, 0.0]}
    assert component_tags([], REWARDS) == {}


def test_a_component_that_nobody_gives_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"reward_weights\.style: .* there are correct, format"):
        component_tags(["style"], REWARDS)


def test_when_every_reward_failed_nothing_can_be_said_about_names() -> None:
    assert component_tags(["style"], [{}, {}]) == {"reward/style": [0.0, 0.0]}
