"""Reward models of transformers, in this process and in an environment's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.data.interface import Message, Prompt, TaskPrompt
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.registry import record_check_of
from nemo_like.environments.server import EnvironmentServer
from nemo_like.plan.machine_rules import Machine
from nemo_like.preflight.checks import preflight
from tests.functional.generation_fixtures import make_checkpoint
from tests.functional.reward_models import decoder, encoder, without_tokenizer_key
from tests.unit.config.checkpoints import DEMO, write_checkpoint
from tests.unit.environments.asking import ask, turn
from tests.unit.environments.configs import env_config

# A score of a row alone and one of the same row among others differ by rounding alone.
ROUNDING = 1e-5


def scores(directory: Path, *turns: Turn, **options: object) -> list[float]:
    feedback = ask("reward_model", *turns, model_name=str(directory), **options)
    assert [one.failure for one in feedback] == [None] * len(turns)
    return [one.rewards["score"] for one in feedback]


def reference(directory: Path, text: str) -> float:
    """The score of a text as transformers alone gives it."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    ids = AutoTokenizer.from_pretrained(directory)(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        return float(model(ids).logits[0, 0])


@pytest.mark.parametrize("make", [decoder, encoder])
def test_scores_are_those_of_the_model_alone_whatever_shares_the_batch(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    directory = make(tmp_path / "model")
    texts = [("12+34=", "46"), ("a", ""), ("what is up? ", "x" * 50), ("q", "h\u00e9llo \u2603 \U0001f600")]
    turns = [turn(response, prompt=prompt) for prompt, response in texts]
    together = scores(directory, *turns)
    assert len({round(score, 3) for score in together}) == len(texts)
    for one, (prompt, response), score in zip(turns, texts, together, strict=True):
        assert scores(directory, one)[0] == pytest.approx(score, abs=ROUNDING)
        assert reference(directory, prompt + response) == pytest.approx(score, abs=ROUNDING)
    assert scores(directory, *turns) == together


def test_the_model_reads_the_conversation_by_its_own_template(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "model", has_template=True)
    messages = (Message("system", "be brief"), Message("user", "12+34="))
    plain, chat = scores(directory, turn("46", prompt="12+34="), turn("46", prompt=messages))
    assert plain == pytest.approx(reference(directory, "user: 12+34=\nassistant: 46\n"), abs=ROUNDING)
    expected = reference(directory, "system: be brief\nuser: 12+34=\nassistant: 46\n")
    assert chat == pytest.approx(expected, abs=ROUNDING)


def test_messages_that_the_template_refuses_are_told_before_a_run(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "model", has_template=True)
    refusing = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for message in messages if message.role != 'tool' %}{{ message.content }} {% endfor %}"
    )
    (directory / "chat_template.jinja").write_text(refusing)
    check = record_check_of(env_config("reward_model", options={"model_name": str(directory)}))
    check(TaskPrompt((Message("user", "q"),), "46"))
    with pytest.raises(ValueError, match="refuses the messages: no system"):
        check(TaskPrompt((Message("system", "be brief"), Message("user", "q")), "46"))
    with pytest.raises(ValueError, match=r"leaves out the content of message 2 \(role 'tool'\)"):
        check(TaskPrompt((Message("user", "q"), Message("tool", "seven")), "46"))
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    check = record_check_of(env_config("reward_model", options={"model_name": str(directory)}))
    with pytest.raises(ValueError, match=r"leaves out the content of message 2 \(role 'assistant'\)"):
        check(TaskPrompt("q", "46"))


def test_a_model_whose_configuration_names_no_pad_scores_by_that_of_the_tokenizer(tmp_path: Path) -> None:
    named = decoder(tmp_path / "named")
    unnamed = decoder(tmp_path / "unnamed", pad_token_id=None)
    turns = [turn("46", prompt="12+34="), turn("x" * 30, prompt="a")]
    assert scores(unnamed, *turns) == pytest.approx(scores(named, *turns), abs=ROUNDING)


def test_scores_in_bfloat16_are_close(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "model")
    (exact,), (rounded,) = (
        scores(directory, turn("46", prompt="12+34="), precision=precision)
        for precision in ("float32", "bfloat16")
    )
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.1, abs=0.05)


def test_a_conversation_that_cannot_be_scored_costs_its_sample_alone(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "model")
    messages: Prompt = (Message("user", "q"),)
    turns = [turn("46", prompt="q"), turn("x" * 12), turn("46", prompt=messages), turn("")]
    good, long, chat, empty = ask("reward_model", *turns, model_name=str(directory), max_length=11)
    assert good.rewards["score"] == pytest.approx(reference(directory, "q46"), abs=ROUNDING)
    for failed, reason in (
        (long, "the conversation has 12 tokens, and the reward model reads 11; shorten responses"),
        (chat, "the prompt is a list of messages, but the tokenizer of model_name="),
        (empty, "the conversation has no tokens"),
    ):
        assert failed.failure is not None
        assert failed.failure.kind is FailureKind.raised
        assert failed.failure.reason.startswith(reason)


def test_a_score_that_is_no_number_fails_its_sample(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    weights["score.weight"].fill_(float("nan"))
    save_file(weights, directory / "model.safetensors", {"format": "pt"})

    async def step() -> list[Feedback]:
        server = EnvironmentServer("rm", env_config("reward_model", options={"model_name": str(directory)}))
        try:
            return await server.step([turn("46", prompt="q")])
        finally:
            await server.close()

    (feedback,) = asyncio.run(step())
    assert feedback.failure is not None
    assert (feedback.failure.kind, feedback.failure.reason) == (
        FailureKind.not_finite,
        "the reward 'score' is nan",
    )


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    del weights["score.weight"]
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks the weights score\.weight, without which"):
        ask("reward_model", model_name=str(directory))


def causal(directory: Path) -> Path:
    return make_checkpoint(directory, tied=True)


def two_labels(directory: Path) -> Path:
    return decoder(directory, num_labels=2)


def no_tokenizer(directory: Path) -> Path:
    (decoder(directory) / "tokenizer_config.json").unlink()
    return directory


def no_pad(directory: Path) -> Path:
    return without_tokenizer_key(decoder(directory), "pad_token")


def no_config(directory: Path) -> Path:
    (decoder(directory) / "config.json").write_text("{")
    return directory


@pytest.mark.parametrize(
    ("make", "rule"),
    [
        (Path, "is not a directory; download the model"),
        (no_config, "has no config.json that transformers can read"),
        (causal, "is a checkpoint of Qwen3ForCausalLM, and a reward model is one of a class that ends in"),
        (two_labels, "has 2 labels, and a reward model has one"),
        (no_tokenizer, "has no tokenizer; save it there with save_pretrained"),
        (no_pad, "has a tokenizer without a pad token, so that conversations of different lengths cannot"),
    ],
)
def test_what_is_no_reward_model_is_told(make: Callable[[Path], Path], rule: str, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    make(directory)
    with pytest.raises(ValueError, match=f"^model_name={directory} {rule}"):
        ask("reward_model", model_name=str(directory))


def test_the_limit_on_tokens_is_at_most_what_the_model_reads(tmp_path: Path) -> None:
    directory = decoder(tmp_path / "model")
    with pytest.raises(ValueError, match="max_length=257 must be at most the 256 positions of the model"):
        ask("reward_model", model_name=str(directory), max_length=257)


def test_a_reward_model_is_looked_at_before_a_run(tmp_path: Path) -> None:
    policy = write_checkpoint(tmp_path / "policy")

    def scored_by(directory: Path) -> Config:
        options = f"{{model_name: {directory}, device: cpu, precision: float32, max_length: null}}"
        kind = ("env.arithmetic.kind=reward_model", f"++env.arithmetic.options={options}")
        return load_config(DEMO, [f"policy.model_name={policy}", *kind])

    good = scored_by(decoder(tmp_path / "good"))
    (note,) = preflight(good, Machine.this, print).notes
    assert str(note) == "checked      env.arithmetic.options.model_name: a reward model with a tokenizer"
    with pytest.raises(ConfigError, match=r"env\.arithmetic\.options\.model_name=\S+ has 2 labels"):
        preflight(scored_by(two_labels(tmp_path / "bad")), Machine.this, print)
    plan = preflight(scored_by(tmp_path / "elsewhere"), Machine.another, print)
    assert any("elsewhere is not here" in str(note) for note in plan.notes)
