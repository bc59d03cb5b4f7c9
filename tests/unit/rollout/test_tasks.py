"""What a sample may have over all its turns: neither the limit of a turn, nor that of another task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.rollout.tasks import response_limit
from nemo_like.rules.rules import validate

Task = Callable[..., Config]
SHAPED = ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=4")
DR_GRPO = ("loss_fn.token_level_loss=false", "grpo.normalize_rewards=false")


@pytest.fixture
def with_task(resolved_demo: Path, tmp_path: Path, checkpoint: Path) -> Task:
    """The demo (4 tokens for a turn, 32 for a sample), with a task of this kind."""

    def load(kind: str, *overrides: str) -> Config:
        path = tmp_path / "top.yaml"
        path.write_text(
            f"defaults: [{resolved_demo}, {{env@env.task: {kind}}}]\ndata: {{train: {{env: task}}}}\n"
        )
        there = [f"policy.model_name={checkpoint}", f"logger.log_dir={tmp_path / 'runs'}"]
        return load_config(path, [*there, *overrides])

    return load


@pytest.mark.parametrize(
    ("kind", "overrides", "limit"),
    [
        ("arithmetic", (), 4),
        ("arithmetic", ("env.task.sampling.max_new_tokens=9",), 9),
        ("calculator", ("env.task.max_turns=3",), 12),
        ("calculator", ("env.task.max_turns=30",), 32),
        ("calculator", ("env.task.max_turns=30", "env.task.max_conversation_tokens=20"), 20),
        ("agent", ("env.task.options.max_calls=2",), 8),
        ("agent", ("env.task.options.credit=last",), 32),
        # All branches of a session train, and a micro-batch holds them.
        (
            "agent",
            (
                "env.task.options.max_calls=64",
                "policy.sequence_packing.train_mb_tokens=200",
                "policy.sequence_packing.logprob_mb_tokens=300",
            ),
            200,
        ),
    ],
)
def test_the_limit_of_a_sample_is_that_of_all_its_turns(
    with_task: Task, kind: str, overrides: tuple[str, ...], limit: int
) -> None:
    assert response_limit(with_task(kind, *overrides), "task") == limit


def test_a_buffer_may_be_longer_than_a_turn_but_not_than_a_sample(with_task: Task) -> None:
    buffer = "grpo.reward_shaping.overlong_buffer_length=8"
    validate(with_task("calculator", *SHAPED, buffer, "env.task.max_turns=3"))
    with pytest.raises(ConfigError, match=r"at most the 4 tokens that a sample of env\.task may have"):
        validate(with_task("arithmetic", *SHAPED, buffer))


def test_the_length_that_is_penalised_is_not_the_limit_of_one_of_several_turns(with_task: Task) -> None:
    of_turn = (*SHAPED, "grpo.reward_shaping.max_response_length=${generation.max_new_tokens}")
    validate(with_task("arithmetic", *of_turn))
    with pytest.raises(ConfigError, match=r"max_response_length=4 is max_new_tokens.*null takes what each"):
        validate(with_task("calculator", *of_turn, "env.task.max_turns=3"))
    with pytest.raises(ConfigError, match=r"max_response_length=4 is max_new_tokens.*null takes what each"):
        validate(with_task("agent", *of_turn, "env.task.options.max_calls=3"))
    validate(with_task("calculator", *SHAPED, "env.task.max_turns=3"))


def test_the_constant_of_dr_grpo_is_not_the_limit_of_one_of_several_turns(with_task: Task) -> None:
    of_turn = "loss_fn.sequence_length_normalizer=${generation.max_new_tokens}"
    validate(with_task("arithmetic", *DR_GRPO, of_turn))
    turns = "env.task.max_turns=3"
    with pytest.raises(ConfigError, match=r"sequence_length_normalizer=4 is max_new_tokens.*set it to 12"):
        validate(with_task("calculator", *DR_GRPO, of_turn, turns))
    validate(with_task("calculator", *DR_GRPO, "loss_fn.sequence_length_normalizer=12", turns))
