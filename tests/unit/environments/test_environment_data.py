"""By what the problems that an environment's package makes are told apart."""

from __future__ import annotations

import pytest

from nemo_like.data.content_digest import digest_of
from nemo_like.environments.environment_data import EnvironmentPrompts
from tests.unit.data.test_datasets import config
from tests.unit.environments.configs import env_config

SOURCE = config("environment", options={"size": 10, "seed": 0})


def digest(kind: str, **options: object) -> str:
    return digest_of(EnvironmentPrompts({"sums": env_config(kind, options=options)}).settings(SOURCE))


def test_another_game_is_other_problems_and_another_way_to_judge_it_is_not() -> None:
    here = digest("gymnasium", env_id="FrozenLake-v1", arguments={"map_name": "4x4", "is_slippery": False})
    assert here == digest(
        "gymnasium",
        env_id="FrozenLake-v1",
        arguments={"is_slippery": False, "map_name": "4x4"},
        invalid_reward=-1.0,
        python="/usr/bin/python3",
    )
    assert here != digest("gymnasium", env_id="Taxi-v3", arguments={"map_name": "4x4"})
    assert here != digest("textarena", env_id="FrozenLake-v1")


@pytest.mark.parametrize("reset_arguments", [{}, {"level": 2}])
def test_a_server_that_moved_makes_the_same_problems(reset_arguments: dict[str, int]) -> None:
    there = {"reset_arguments": reset_arguments, "action": {"message": "{response}"}}
    first, second = (digest("openenv", base_url=f"http://{host}:1", **there) for host in ("a", "b"))
    assert first == second
