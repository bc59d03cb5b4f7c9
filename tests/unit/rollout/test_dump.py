from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nemo_like.batch.columns import Column, Layout
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.data.interface import Message, TaskPrompt
from nemo_like.environments.interface import Exchange, Failure, FailureKind
from nemo_like.rollout.conversation import Conversation, Limits, Passage
from nemo_like.rollout.dump import StepSamples
from nemo_like.rollout.prompts import PromptOrigin

PLACE = PromptOrigin("pairs", 17)


def texts(token_ids: Sequence[int]) -> list[str]:
    return [f"<{token}>" for token in token_ids]


def conversation(generation: int, response: str, **changes: object) -> Conversation:
    example = TaskPrompt("21+43=", "640", env="addition")
    sample = Conversation(example, (1,), 0, generation, Limits(max_turns=2, max_tokens=9), seed=0)
    sample.latest_response = response
    for name, value in changes.items():
        setattr(sample, name, value)
    return sample


def batch_of(chunk: str, group: int, rewards: list[float]) -> KVBatchMeta:
    """One group."""
    count = len(rewards)
    return KVBatchMeta(
        partition="train-3",
        chunks=(Chunk(chunk, (4,) * count),),
        rows=tuple((0, row) for row in range(count)),
        columns=frozenset(),
        tags={
            "group_id": (group,) * count,
            "reward": tuple(rewards),
            "outcome": ("trained",) * count,
            "shaped_reward": tuple(rewards),
            "advantage": (0.0,) * count,
        },
    )


def read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_sample_becomes_one_line_with_its_conversation_and_its_tags(tmp_path: Path) -> None:
    samples = StepSamples(texts)
    first, second = batch_of("a", 5, [1.0, 0.0]), batch_of("b", 6, [0.0])
    failure = Failure(FailureKind.raised, "it raised")
    samples.remember(
        3,
        first,
        [[conversation(0, "640", rewards={"exact": 1.0}), conversation(1, "", failure=failure)]],
        [PLACE],
    )
    samples.remember(3, second, [[conversation(0, "650", history=[Exchange("600", "try again")])]], [PLACE])
    path = tmp_path / "rollouts" / "step_3.jsonl"
    # Dropped groups come last in the ledger, but not in the file.
    samples.write(path, 3, [second, first.subset([1, 0])])
    lines = read(path)
    assert [(line["group"], line["generation"]) for line in lines] == [(5, 0), (5, 1), (6, 0)]
    assert lines[0] == {
        "step": 3,
        "group": 5,
        "generation": 0,
        "outcome": "trained",
        "env": "addition",
        "source": "pairs",
        "index": 17,
        "prompt": "21+43=",
        "turns": [{"role": "assistant", "content": "640"}],
        "answer": "640",
        "rewards": {"exact": 1.0},
        "failure": None,
        "failure_kind": None,
        "tokens": {},
        "reward": 1.0,
        "shaped_reward": 1.0,
        "advantage": 0.0,
    }
    assert lines[2]["turns"] == [
        {"role": "assistant", "content": "600"},
        {"role": "environment", "content": "try again"},
        {"role": "assistant", "content": "650"},
    ]


def test_a_sample_whose_reward_failed_has_no_numbers_that_look_like_a_wrong_answer(tmp_path: Path) -> None:
    samples, batch = StepSamples(texts), batch_of("a", 0, [0.0, 0.0])
    failure = Failure(FailureKind.raised, "it raised")
    samples.remember(3, batch, [[conversation(0, "650"), conversation(1, "640", failure=failure)]], [PLACE])
    samples.write(tmp_path / "step_3.jsonl", 3, [batch])
    wrong, failed = read(tmp_path / "step_3.jsonl")
    numbers = ("reward", "shaped_reward", "advantage")
    assert [wrong[name] for name in numbers] == [0.0, 0.0, 0.0]
    assert [failed[name] for name in numbers] == [None, None, None]
    assert (wrong["failure"], failed["failure"]) == (None, "it raised")
    assert (wrong["failure_kind"], failed["failure_kind"]) == (None, "raised")


def test_a_prompt_of_messages_is_written_with_its_roles(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    called = Message("assistant", "", {"tool_calls": [call]})
    prompt = (Message("system", "Be brief."), Message("user", "2+2?"), called, Message("tool", "4"))
    samples, batch = StepSamples(texts), batch_of("a", 0, [1.0])
    samples.remember(1, batch, [[conversation(0, "4", task_prompt=TaskPrompt(prompt, "4"))]], [PLACE])
    samples.write(tmp_path / "step_1.jsonl", 1, [batch])
    assert read(tmp_path / "step_1.jsonl")[0]["prompt"] == (
        '[system] Be brief.\n[user] 2+2?\n[assistant] {"name": "add", "arguments": {"a": 2}}\n[tool] 4'
    )


def test_samples_are_kept_until_their_step_is_written(tmp_path: Path) -> None:
    samples, old, new = StepSamples(texts), batch_of("a", 0, [1.0]), batch_of("b", 0, [1.0])
    samples.remember(3, old, [[conversation(0, "")]], [PLACE])
    samples.remember(4, new, [[conversation(0, "")]], [PLACE])
    samples.write(tmp_path / "old.jsonl", 3, [old])
    samples.write(tmp_path / "new.jsonl", 4, [new])
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("old.jsonl", "new.jsonl")] == [1, 1]
    for step, batch in ((3, old), (4, new)):
        with pytest.raises(KeyError):
            samples.write(tmp_path / "again.jsonl", step, [batch])


def test_a_step_that_was_never_written_is_forgotten_with_a_later_one(tmp_path: Path) -> None:
    samples, old, new = StepSamples(texts), batch_of("a", 0, [1.0]), batch_of("b", 0, [1.0])
    samples.remember(3, old, [[conversation(0, "")]], [PLACE])
    samples.remember(4, new, [[conversation(0, "")]], [PLACE])
    samples.write(tmp_path / "new.jsonl", 4, [new])
    with pytest.raises(KeyError):
        samples.write(tmp_path / "old.jsonl", 3, [old])


def test_each_line_of_an_excerpt_says_how_many_samples_there_were(tmp_path: Path) -> None:
    samples, kept, left_out = StepSamples(texts), batch_of("a", 0, [1.0, 0.0]), batch_of("b", 1, [1.0, 1.0])
    samples.remember(10, kept, [[conversation(0, "640"), conversation(1, "650")]], [PLACE])
    ledger = samples.remembered(10, [left_out, KVBatchMeta.concat([left_out, kept])])
    assert [batch.sample_ids for batch in ledger] == [("a/0", "a/1")]
    samples.write(tmp_path / "step_10.jsonl", 10, ledger, num_samples=6)
    lines = read(tmp_path / "step_10.jsonl")
    assert [(line["group"], line["generation"], line["excerpt_of"]) for line in lines] == [
        (0, 0, 6), (0, 1, 6)
    ]  # fmt: skip


def test_a_line_of_a_whole_step_says_nothing_of_an_excerpt(tmp_path: Path) -> None:
    samples, batch = StepSamples(texts), batch_of("a", 0, [1.0])
    samples.remember(10, batch, [[conversation(0, "640")]], [PLACE])
    samples.write(tmp_path / "step_10.jsonl", 10, [batch], num_samples=1)
    assert "excerpt_of" not in read(tmp_path / "step_10.jsonl")[0]


class Shape:
    def __repr__(self) -> str:
        return "Shape()"


def test_columns_are_shown_whatever_is_in_them(tmp_path: Path) -> None:
    columns = (
        Column("credit", "float32", Layout.per_token),
        Column("images", "", Layout.ragged),
        Column("notes", "", Layout.objects),
    )
    circle: list[object] = []
    circle.append(circle)
    notes = {(0, 1): 2, "nan": math.nan, "array": np.array([1, 2]), "shape": Shape(), "circle": circle}
    sample = conversation(0, "640")
    given = {"credit": [0.5, 1.0], "images": [np.ones((1, 2), np.uint8)], "notes": notes}
    sample.passages.append(Passage(np.array([5, 6], np.int32), np.zeros(2, np.float32), given))
    samples, batch = StepSamples(texts), batch_of("a", 5, [1.0])
    samples.remember(3, batch, [[sample]], [PLACE], columns)
    path = tmp_path / "rollouts" / "step_3.jsonl"
    samples.write(path, 3, [batch])
    assert "NaN" not in path.read_text()
    (line,) = read(path)
    assert line["columns"]["credit"] == [0.0, 0.5, 1.0]  # type: ignore[index]
    assert line["columns"]["images"] == [[[1, 1]]]  # type: ignore[index]
    assert isinstance(line["columns"]["notes"], str)  # type: ignore[index]
    notes.pop("circle")
    samples.remember(4, batch, [[sample]], [PLACE], columns)
    samples.write(path, 4, [batch])
    (line,) = read(path)
    assert line["columns"]["notes"] == {"(0, 1)": 2, "nan": None, "array": [1, 2], "shape": "Shape()"}  # type: ignore[index]


def spoken() -> Conversation:
    """A prompt of one token, a response of two, an observation of one, a response of one."""
    sample = conversation(0, "640")
    sample.passages += [
        Passage(np.array([5, 6], np.int32), np.array([-0.5, -1.0], np.float32)),
        Passage(np.array([7], np.int32), None),
        Passage(np.array([8], np.int32), np.array([-0.125], np.float32)),
    ]
    return sample


def test_the_tokens_after_the_prompt_come_with_what_engine_and_trainer_say_of_them(tmp_path: Path) -> None:
    samples, batch = StepSamples(texts), batch_of("a", 5, [1.0])
    scores = {"a/0": {"prev_logprobs": np.array([0.0, -0.5, -1.25, 0.0, math.nan], np.float32)}}
    samples.remember(3, batch, [[spoken()]], [PLACE])
    samples.write(tmp_path / "step_3.jsonl", 3, [batch], scores)
    (line,) = read(tmp_path / "step_3.jsonl")
    assert line["tokens"] == {
        "text": ["<5>", "<6>", "<7>", "<8>"],
        "generation_logprobs": [-0.5, -1.0, None, -0.125],
        "prev_logprobs": [-0.5, -1.25, None, None],  # not a number is null, too
    }


def test_with_a_critic_tokens_have_the_advantages_that_the_loss_takes(tmp_path: Path) -> None:
    samples = StepSamples(texts)
    tags = {"advantage": [-0.5], "token_scale": [2.0], "sample_mask": [1.0]}
    batch = batch_of("a", 5, [1.0]).with_tags(tags)
    scores = {"a/0": {"token_advantages": np.array([0.0, 1.0, 0.25, 0.0, -1.0], np.float32)}}
    samples.remember(3, batch, [[spoken()]], [PLACE])
    samples.write(tmp_path / "step_3.jsonl", 3, [batch], scores)
    (line,) = read(tmp_path / "step_3.jsonl")
    # -0.5 + 2 * token_advantages
    assert line["tokens"]["advantages"] == [1.5, 0.0, None, -2.5]  # type: ignore[index]
    masked = batch.with_tags({"advantage": [0.0], "sample_mask": [0.0]})
    samples.remember(4, masked, [[spoken()]], [PLACE])
    samples.write(tmp_path / "step_4.jsonl", 4, [masked], scores)
    (line,) = read(tmp_path / "step_4.jsonl")
    assert line["tokens"]["advantages"] == [0.0, 0.0, None, 0.0]  # type: ignore[index]


def test_a_validation_has_no_outcome(tmp_path: Path) -> None:
    samples, batch = StepSamples(texts), batch_of("a", 5, [1.0])
    kept = {name: values for name, values in batch.tags.items() if name in ("group_id", "reward")}
    samples.remember(3, replace(batch, tags=kept), [[conversation(0, "640")]], [PLACE])
    samples.write(tmp_path / "validation_3.jsonl", 3, [replace(batch, tags=kept)])
    (line,) = read(tmp_path / "validation_3.jsonl")
    assert (line["outcome"], line["reward"], line["source"], line["index"]) == (None, 1.0, "pairs", 17)
