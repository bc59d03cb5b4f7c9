"""Environments inside whole runs: tasks that are learnt, tools in the mask, rewards that misbehave."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from nemo_like.data.arithmetic import addition_answer, addition_prompt
from nemo_like.environments.kinds.calculator import evaluate
from nemo_like.environments.kinds.sliding_puzzle import num_misplaced, slide
from nemo_like.observability.jsonl import without_measurements
from scripts.demo_model.tiny_tokenizer import EOS, UNKNOWN, vocabulary
from tests.functional.runs import CONFIG, ROOT, FinishedRun, run_grpo
from tests.functional.taught_models import Said, teach
from tests.lacking import REASONING_GYM

pytestmark = [pytest.mark.timeout(400), pytest.mark.whole_run]

SMALL = {
    "grpo": {
        "num_prompts_per_step": 32,
        "num_generations_per_prompt": 8,
        "val_at_start": False,
        "val_at_end": False,
        "val_period": 0,
    },
    "policy": {
        "data_parallel_size": 1,
        "train_global_batch_size": 64,
        "optimizer": {"lr": 1.0e-3},
        "scheduler": {"warmup_updates": 8, "decay_style": "constant"},
    },
    "generation": {"num_engines": 1},
    "data_plane": {"backend": "in_memory"},
    "checkpointing": {"export_final_hf": False},
    "logger": {"wandb": {"mode": "disabled"}},
}


def run_task(
    directory: Path,
    kind: str,
    settings: Mapping[str, Any],
    problems: Sequence[Mapping[str, Any]] | None = None,
    exit_code: int = 0,
) -> FinishedRun:
    """The demo made small, with ``problems`` judged by an environment "task" of this kind."""
    source: dict[str, Any] = {"env": "task"}
    if problems is not None:
        path = directory / "problems.jsonl"
        path.write_text("".join(json.dumps(problem) + "\n" for problem in problems))
        source |= {"kind": "jsonl", "path": str(path)}
    data = {"data": {"train": source, "validation": source}}
    defaults = [str(ROOT / CONFIG), {f"{ROOT}/configs/env@env.task": kind}]
    layers = {"small": SMALL, "data": data, "settings": settings}
    for name, layer in layers.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(layer))
    (directory / "run.yaml").write_text(yaml.safe_dump({"defaults": [*defaults, *layers]}))
    run = run_grpo(directory, config=str(directory / "run.yaml"))
    assert run.returncode == exit_code, run.output
    return run


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# A task of reasoning-gym


@pytest.mark.slow
def test_a_reasoning_gym_task_is_learnt(tmp_path: Path) -> None:
    gym = pytest.importorskip("reasoning_gym", reason=REASONING_GYM)
    entries = gym.create_dataset(
        "basic_arithmetic",
        min_terms=2,
        max_terms=2,
        min_digits=1,
        max_digits=1,
        operators=["+"],
        allow_parentheses=False,
        seed=1,
        size=256,
    )
    problems = [
        {"prompt": entry["question"], "answer": entry["answer"], "metadata": entry["metadata"]}
        for entry in entries
    ]

    def show(rng: random.Random) -> list[Said]:
        problem = rng.choice(problems)
        return [(problem["prompt"], False), (problem["answer"] + EOS, True)]

    model = teach(tmp_path / "model", show, num_steps=130)
    settings = {
        "grpo": {"max_num_steps": 14, "num_prompts_per_step": 128},
        "policy": {"model_name": str(model), "train_global_batch_size": 128},
    }
    run = run_task(tmp_path, "reasoning_gym", settings, problems)
    scores = run.metrics("train/env/task/reward/score")
    assert scores == pytest.approx(run.metrics("train/reward"))
    assert mean(scores[-4:]) > mean(scores[:2]) + 0.1


# A game of many turns


def boards() -> list[str]:
    """All that can be reached from the solved board, itself aside."""
    reached = ["12\n3-"]
    for board in reached:
        reached += [after for move in "udlr" if (after := slide(board, move)) not in reached]
    return reached[1:]


def distance(board: str) -> int:
    """Moves to the solved board."""
    frontier, seen, moves = {board}, set(), 0
    while not any(num_misplaced(reached) == 0 for reached in frontier):
        seen |= frontier
        frontier = {slide(reached, move) for reached in frontier for move in "udlr"} - seen
        moves += 1
    return moves


def show_game(rng: random.Random) -> list[Said]:
    """A player who moves at random."""
    board = rng.choice(boards())
    said: list[Said] = [(board + "\n", False)]
    for _ in range(3):
        move = rng.choice([move for move in "udlr" if slide(board, move) != board])
        said.append((move + EOS, True))
        board = slide(board, move)
        if num_misplaced(board) == 0:
            break
        said.append((f"\n{board}\n", False))
    return said


def play(directory: Path, num_steps: int) -> FinishedRun:
    """Train on the boards that three moves can solve."""
    near = [board for board in boards() if distance(board) <= 3]
    problems = [{"prompt": board + "\n", "answer": "", "board": board} for board in near * 16]
    model = teach(directory / "model", show_game, num_steps=60)
    settings = {
        "grpo": {"max_num_steps": num_steps},
        "policy": {"model_name": str(model), "max_total_sequence_length": 48},
        "env": {"task": {"max_turns": 3, "batch_size": 32}},
    }
    return run_task(directory, "sliding_puzzle", settings, problems)


@pytest.fixture(scope="module")
def game(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return play(tmp_path_factory.mktemp("game"), num_steps=8)


@pytest.mark.slow
def test_a_game_of_many_turns_is_learnt(game: FinishedRun) -> None:
    rewards, turns = game.metrics("train/reward"), game.metrics("train/avg_turns_per_sample")
    assert mean(rewards[-2:]) > mean(rewards[:2]) + 0.15
    # Who solves a board sooner needs fewer turns.
    assert 1.0 < mean(turns[-2:]) < mean(turns[:2]) <= 3.0
    assert max(game.metrics("train/token_mult_prob_error")) < 1.001


@pytest.mark.slow
def test_a_seed_fixes_every_turn_of_every_sample(game: FinishedRun, tmp_path: Path) -> None:
    again = play(tmp_path, num_steps=2)
    first = [without_measurements(record) for record in game.records() if record["step"] <= 2]
    assert [without_measurements(record) for record in again.records()] == first


# A tool


def show_call(rng: random.Random) -> list[Said]:
    """One call for the sum, then its result as the answer."""
    x, y = rng.randrange(10), rng.randrange(10)
    return [(f"{x}+{y}=", False), (f"calc {x}+{y}?", True), (f" {x + y}\n", False), (f"{x + y}{EOS}", True)]


def expected_mask(tokens: Sequence[str], prompt: str) -> list[int]:
    """What a person would mark: a call up to its "?", then not its result, then all that follows."""
    text = "".join(token[0] for token in tokens)
    mask = [0] * len(prompt)
    while len(mask) < len(tokens):
        said = text[len(mask) :]
        call = re.match(r".*?calc (.*?)\?", said, re.DOTALL)
        mask += [1] * (len(said) if call is None else call.end())
        if call is not None and len(mask) < len(tokens):
            said_by_tool = f" {evaluate(call.group(1))}\n"
            # What the vocabulary cannot spell is one unknown token each.
            result = "".join(letter if letter in vocabulary() else UNKNOWN[0] for letter in said_by_tool)
            assert text[len(mask) : len(mask) + len(result)] == result
            mask += [0] * len(result)
    return mask


@pytest.mark.slow
def test_a_conversation_with_a_tool_has_the_right_mask_token_for_token(tmp_path: Path) -> None:
    problems = [{"prompt": f"{x}+{y}=", "answer": str(x + y)} for x in range(8) for y in range(4)]
    model = teach(tmp_path / "model", show_call, num_steps=100)
    calculator = {
        "max_turns": 3,
        "sampling": {"stop_strings": ["?"], "max_new_tokens": 12},
        "options": {"call_pattern": r"calc (.*?)\?", "result_template": " {result}\n"},
    }
    settings = {
        "grpo": {
            "max_num_steps": 1,
            "reward_shaping": {"enabled": True, "overlong_buffer_length": 4},
        },
        "policy": {"model_name": str(model), "max_total_sequence_length": 64},
        "env": {"task": calculator},
        "rollout": {"generate_only": True, "record": True},
    }
    run = run_task(tmp_path, "calculator", settings, problems)
    # A call and an answer are longer than the demo's one turn, and far from three turns of 12 tokens.
    (record,) = run.records()
    assert record["train/mean_gen_tokens_per_sample"] > 8
    assert record["train/shaped_reward"] == pytest.approx(record["train/filtered_reward"], abs=0.02)
    (path,) = (run.run_dir / "recorded").glob("step_1-*.npz")
    names = {index: token for token, index in vocabulary().items()}
    with np.load(path) as rollout:
        ends = np.cumsum(rollout["lengths"])[:-1]
        columns = ("input_ids", "response_mask", "generation_logprobs")
        samples = list(zip(*(np.split(rollout[f"column/{name}"], ends) for name in columns), strict=True))
        tags = json.loads(rollout["description.json"].tobytes())["tags"]
    assert set(tags["max_response_tokens"]) == {36}
    num_with_result = 0
    for input_ids, mask, logprobs in samples:
        tokens = [names[index] for index in input_ids.tolist()]
        expected = expected_mask(tokens, prompt="".join(tokens)[:4])
        assert mask.tolist() == expected
        assert np.array_equal(logprobs != 0, mask == 1)
        num_with_result += "01" in "".join(map(str, expected))[4:]
    assert len(samples) == 256
    assert num_with_result > 200


# Rewards that misbehave

MOODS = ("hang", "raise", "kill", "nan")  # each for one prompt, so for the four samples of its group
KINDS = ("timed_out", "raised", "died", "not_finite")


@pytest.mark.slow
def test_bad_rewards_cost_their_samples_and_the_step_completes_without_them(
    arithmetic_model: str, tmp_path: Path
) -> None:
    settings = {
        "grpo": {"max_num_steps": 2, "num_generations_per_prompt": 4},
        "policy": {"model_name": str(ROOT / arithmetic_model)},
        "env": {"task": {"timeout_s": 2.0, "options": {"function": "tests.functional.misbehaving:reward"}}},
    }
    # The first problem is asked before training, and must be judged.
    moods = ["good", *MOODS, *["good"] * 27]
    problems = [{**problem, "mood": mood} for problem, mood in zip(sums(32), moods, strict=True)]
    run = run_task(tmp_path, "function", settings, problems)
    first, second = (record for record in run.records() if "train/loss" in record)
    for record in (first, second):
        failed = {kind: record[f"train/env/task/num_failed_rewards/{kind}"] for kind in KINDS}
        assert failed == dict.fromkeys(KINDS, 4.0)
        assert record["train/num_failed_rewards"] == 16
        assert record["train/global_valid_seqs"] == 128 - 16
        assert record["train/failed_reward_share"] == 16 / 128
        # A right answer earns 1, and nothing else is counted: not the failed ones, either.
        judged = record["train/env/task/reward"]
        assert record["train/reward"] == record["train/filtered_reward"] == judged
    # Each kind once, in the first step, and not again in the second.
    assert all(run.output.count(f"({kind}): ") == 1 for kind in KINDS)
    assert run.output.count("12.5% of the rewards failed") == 2
    assert "failed rewards   12.5% in training" in run.output
    log = (run.run_dir / "logs" / "rollout.log").read_text()
    for reason in (
        "the reward took longer than env.task.timeout_s=2 s",
        "the reward raised KeyError: 'no such answer'",
        "the reward ended its process (signal SIGKILL)",
        "the reward 'reward' is nan",
    ):
        assert re.search(
            rf"training step 1, prompt \d+, sample \d, environment task: {re.escape(reason)}", log
        )


def sums(count: int) -> list[dict[str, str]]:
    return [
        {
            "prompt": addition_prompt(30 + i, 12, digits=2),
            "answer": addition_answer(30 + i, 12, digits=2),
        }
        for i in range(count)
    ]


@pytest.mark.slow
def test_an_environment_that_fails_most_samples_ends_the_run_with_exit_code_3_and_trains_nothing(
    arithmetic_model: str, tmp_path: Path
) -> None:
    settings = {
        "grpo": {"max_num_steps": 2},
        "policy": {"model_name": str(ROOT / arithmetic_model)},
        "env": {"task": {"options": {"function": "tests.functional.misbehaving:mostly_failing"}}},
    }
    run = run_task(tmp_path, "function", settings, sums(32), exit_code=3)
    assert run.records() == []
    warning = (
        r"warning: env\.task: no reward for prompt \d+, sample \d in training step 1 \(raised\): the reward"
    )
    assert len(re.findall(warning, run.output)) == 1
    assert re.search(r"The run failed: env\.task gave no reward for \d+ of 256 samples", run.output)
    assert "the reward raised KeyError: 'no such answer'" in run.output
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_a_reward_server_that_does_not_answer_is_an_error_before_training(
    arithmetic_model: str, tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}/score"
    settings = {
        "policy": {"model_name": str(ROOT / arithmetic_model)},
        "env": {"task": {"options": {"url": url, "retry_pause_s": 0.01}}},
    }
    run = run_task(tmp_path, "http", settings, sums(4), exit_code=1)
    assert run.records() == []
    for part in (
        "env.task (kind=http) was asked once before training, and gave no reward",
        f"answer: unreachable: POST {url} gave ConnectError",
        'sent was {"turns": [{"prompt": "',
        "start the server or correct env.task.options.url; docs/how_to/environments.md has the format; "
        "env.task.check_at_start=false starts without asking",
    ):
        assert part in run.output
    assert "Traceback" not in run.output
