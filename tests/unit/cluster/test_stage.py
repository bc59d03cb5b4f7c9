from __future__ import annotations

from dataclasses import fields

from nemo_like.cluster.options import StageTimeoutsConfig
from nemo_like.cluster.stage import Stage


def test_every_stage_after_the_start_has_a_key_for_its_deadline() -> None:
    starting = {Stage.engine_start.name, Stage.policy_start.name}
    assert {key.name for key in fields(StageTimeoutsConfig)} == {stage.name for stage in Stage} - starting


def test_no_two_stages_are_one() -> None:
    assert len(Stage) == len({stage.title for stage in Stage}) == len(Stage.__members__)
