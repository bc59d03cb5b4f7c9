"""Each hub's adapter plays episodes of a real environment of its package, in the package's process."""

from __future__ import annotations

import asyncio
import itertools
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nemo_like.data.interface import Message, TaskPrompt
from nemo_like.environments.interface import Exchange, FailureKind, Feedback
from nemo_like.environments.server import EnvironmentServer
from tests.functional.hub_fixtures import (
    PYTHON,
    echo_server,
    hanoi,
    hub_config,
    played,
    problems,
    total,
    turn,
)
from tests.lacking import HUBS

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=HUBS),
]

LAKE = {
    "env_id": "FrozenLake-v1",
    "arguments": {"render_mode": "ansi", "is_slippery": False},
    "action_pattern": r"\b(left|down|right|up)\b",
    "actions": {"left": 0, "down": 1, "right": 2, "up": 3},
    "invalid_reward": -0.1,
    "prompt_template": "Walk to G.\n{observation}\nleft, down, right or up?",
}
WAY = ["down", "down", "right", "right", "down", "right"]


def test_a_gymnasium_game_is_walked_to_its_goal() -> None:
    cfg = hub_config("gymnasium", **LAKE)
    first, second = problems(cfg, 2, seed=7)
    assert first.prompt == "Walk to G.\nSFFF\nFHFH\nFFFH\nHFFG\nleft, down, right or up?"
    assert (first.data, second.data) == ({"episode": {"seed": 7}}, {"episode": {"seed": 8}})
    answers = iter(["which way?", *(f"I go {step}." for step in WAY)])
    feedback = played(cfg, first, lambda shown: next(answers))
    assert total(feedback) == pytest.approx(0.9)  # a response without an action, and the goal
    assert [one.is_done for one in feedback] == [False] * 6 + [True]
    assert [one.metrics["valid_action"] for one in feedback] == [0.0] + [1.0] * 6
    assert "(Down)" in str(feedback[1].observation)


def test_what_an_episode_draws_follows_from_its_seed_also_where_it_is_played_again() -> None:
    """A slippery lake moves at random: an episode whose process is lost after the first turn goes on as one
    that is not."""
    slippery = {**LAKE, "arguments": {"render_mode": "ansi", "is_slippery": True}}
    cfg = hub_config("gymnasium", **slippery)
    (example,) = problems(cfg, 1, seed=3)

    async def lose_process(server: EnvironmentServer) -> None:
        await server.close()

    def walk(between: Any) -> list[Feedback]:
        way = itertools.cycle(WAY)
        return played(cfg, example, lambda shown: next(way), between)

    whole, again = walk(None), walk(lose_process)
    assert [one.observation for one in whole] == [one.observation for one in again]
    assert len(whole) > 1
    assert total(whole) == total(again)


def test_a_textarena_game_is_played_to_its_end() -> None:
    cfg = hub_config("textarena", env_id="TowerOfHanoi-v0")
    (example,) = problems(cfg, 1)
    feedback = played(cfg, example, hanoi)
    assert len(feedback) == 7
    assert total(feedback) == 1.0
    assert feedback[-1].metrics == {"invalid_move": 0.0, "ended": 1.0}
    assert str(feedback[0].observation).count("Current Board") == 1  # what is new, not all before


def test_a_textarena_game_that_runs_out_of_turns_earns_nothing() -> None:
    cfg = hub_config("textarena", max_turns=3, env_id="TowerOfHanoi-v0")
    feedback = played(cfg, problems(cfg, 1)[0], hanoi)
    assert (len(feedback), total(feedback)) == (3, 0.0)
    assert (feedback[-1].is_done, feedback[-1].metrics["ended"]) == (False, 0.0)


def test_another_player_of_textarena_is_a_function() -> None:
    opponent = "tests.functional.textarena_opponent:first_free"
    cfg = hub_config("textarena", env_id="TicTacToe-v0", num_players=2, opponent=opponent)
    answers = iter(["[4]", "[2]", "[6]"])
    feedback = played(cfg, problems(cfg, 1)[0], lambda shown: next(answers))
    assert "[Player 1] [0]" in str(feedback[0].observation)
    assert total(feedback) == 1.0


@pytest.fixture(scope="module")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with echo_server(tmp_path_factory.mktemp("openenv")) as url:
        yield url


def test_an_openenv_server_answers_an_episode(parrot: str) -> None:
    """All of an observation is shown where no key is named."""
    options = {"base_url": parrot, "action_pattern": "say (.*)"}
    (example,) = problems(hub_config("openenv", **options), 1)
    assert "environment ready!" in json.loads(str(example.prompt))["echoed_message"]
    cfg = hub_config("openenv", max_turns=3, observation_key="echoed_message", **options)
    feedback = played(cfg, example, lambda shown: "say hello")
    assert [one.rewards for one in feedback] == [{"reward": 0.5}] * 3  # a tenth for each letter
    assert feedback[0].observation == "\nhello\n"


@pytest.mark.slow
def test_an_openenv_server_that_is_not_there_is_named() -> None:
    example = TaskPrompt(prompt="say something", answer="", data={"episode": {"seed": 0}}, env="game")
    cfg = hub_config("openenv", base_url="http://127.0.0.1:9", message_timeout_s=5.0)
    (feedback,) = played(cfg, example, lambda shown: "hello")
    assert feedback.failure is not None
    assert feedback.failure.kind is FailureKind.unreachable
    assert "the OpenEnv server at http://127.0.0.1:9 gave ConnectionError" in feedback.failure.reason


@pytest.fixture(scope="module")
def tasks() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        yield {"taskset": {"id": "verifiers_tasks"}}


@pytest.fixture(scope="module")
def addition(tasks: dict[str, Any]) -> TaskPrompt:
    """One of the sums of the taskset."""
    return problems(hub_config("verifiers", env=tasks), 2, seed=3)[0]


def test_the_environment_of_a_verifiers_taskset_is_played_over_turns(
    tasks: dict[str, Any], addition: TaskPrompt
) -> None:
    cfg = hub_config("verifiers", env=tasks)
    assert addition.prompt == (Message("system", "Add."), Message("user", "3+1="))
    answers = iter(["five", "4"])
    feedback = played(cfg, addition, lambda shown: next(answers))
    assert feedback[0].observation == "wrong, again"
    assert feedback[1].rewards == {"is_right": 0.5, "is_short": 1.0}
    assert feedback[1].metrics == {"replies": 2.0}


@pytest.mark.slow
def test_a_verifiers_task_alone_is_one_reply(tasks: dict[str, Any]) -> None:
    cfg = hub_config("verifiers", max_turns=1, env={**tasks, "id": "single_agent"})
    feedback = played(cfg, problems(cfg, 1)[0], lambda shown: "forty")
    assert [one.rewards for one in feedback] == [{"is_right": 0.0, "is_short": 0.0}]


def test_a_verifiers_conversation_without_turns_left_is_judged_as_it_stands(
    tasks: dict[str, Any], addition: TaskPrompt
) -> None:
    cfg = hub_config("verifiers", max_turns=2, env=tasks)
    feedback = played(cfg, addition, lambda shown: "7")
    assert (feedback[-1].is_done, feedback[-1].rewards) == (False, {"is_right": 0.0, "is_short": 1.0})


@pytest.mark.slow
def test_messages_of_a_verifiers_task_come_with_all_of_their_fields(tasks: dict[str, Any]) -> None:
    cfg = hub_config(
        "verifiers", max_turns=1, env={"taskset": {"id": "verifiers_chats"}, "id": "single_agent"}
    )
    (example,) = problems(cfg, 1)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    assert example.prompt == (
        Message("system", "Add."),
        Message("user", "1+2?"),
        Message("assistant", "", {"reasoning_content": "add them", "tool_calls": [call]}),
        Message("tool", "3", {"tool_call_id": "1", "name": "add"}),
    )
    (feedback,) = played(cfg, example, lambda shown: "3")
    assert feedback.rewards == {"num_said": 5.0}
    with pytest.raises(ValueError, match="task 1 has an image in its prompt, which is not served"):
        problems(cfg, 2)


def test_a_package_that_refuses_its_options_says_why(tasks: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"env\.game \(kind=gymnasium\) makes no problems: .*NoSuchLake"):
        problems(hub_config("gymnasium", env_id="NoSuchLake-v0"), 1)
    with pytest.raises(ValueError, match="has no problems from 20 on"):
        problems(hub_config("verifiers", env=tasks), 1, seed=20)


def test_an_environment_that_does_not_follow_from_its_seed_fails_the_sample_and_says_so() -> None:
    cfg = hub_config("gymnasium", **LAKE)
    (example,) = problems(cfg, 1)

    async def ask() -> Any:
        server = EnvironmentServer("game", cfg)
        try:
            earlier = (Exchange("down", "\nanother lake\n"),)
            return (await server.step([turn(example, "down", earlier, pickle.dumps("gone"), False)]))[0]
        finally:
            await server.close()

    failure = asyncio.run(ask()).failure
    assert failure.kind is FailureKind.raised
    assert "turn 1 came out otherwise" in failure.reason
