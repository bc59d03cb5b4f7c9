"""The slow checks as a run makes them, each in its child process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.batch.recordings import MANIFEST
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.plan.machine_rules import Machine
from nemo_like.preflight.checks import preflight
from tests.unit.config.checkpoints import REPOSITORY, SCORED

Demo = Callable[..., Config]


def say(line: str) -> None:
    """Keep it from the terminal."""


def test_a_run_on_sums_starts_no_process_for_its_checks(demo: Demo, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("subprocess.Popen", "nemo_like.preflight.checks.ChildCall"):
        monkeypatch.setattr(name, None)
    assert preflight(demo(), Machine.this, say).notes == []


def test_stale_samples_without_a_correction_are_warned_of_however_a_run_is_started(demo: Demo) -> None:
    said: list[str] = []
    preflight(
        demo("grpo.max_staleness=1", "loss_fn.use_generation_logprobs_as_prev=false"),
        Machine.another,
        said.append,
    )
    assert any(line.startswith("warning: grpo.max_staleness=1: samples of older weights") for line in said)


def test_everything_that_is_wrong_is_told_at_once(
    demo: Demo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_rewards.py").write_text("def score(turn): ...\n")
    (tmp_path / "train.jsonl").write_text("no JSON\n")
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    cfg = demo(
        *("data.train.kind=jsonl", f"data.train.path={tmp_path}/train.jsonl"),
        *("data.validation.kind=jsonl", f"data.validation.path={tmp_path}/held_out.jsonl"),
        "policy.model_name=models/Qwen3-8B",  # no tokenizer, which would take seconds to load
        "env.arithmetic.kind=function",
        "++env.arithmetic.options={function: 'own_rewards:skore', arguments: {}}",
        "grpo.adv_estimator.name='own_rewards:nothing'",
    )
    with pytest.raises(ConfigError) as raised:
        preflight(cfg, Machine.another, say)
    told = str(raised.value)
    assert told.startswith("3 problems")
    assert f"data.train.path={tmp_path}/train.jsonl cannot be used: {tmp_path}/train.jsonl:1: " in told
    assert "env.arithmetic.options.function=own_rewards:skore cannot be imported: " in told
    assert "grpo.adv_estimator.name=own_rewards:nothing cannot be imported: " in told


def test_lora_on_layers_that_the_model_lacks_is_refused_by_the_model_itself(demo: Demo) -> None:
    qwen3 = REPOSITORY / "recipes" / "shapes" / "Qwen3-8B"
    lora = ("policy.backend=fsdp", "policy.lora.enabled=true", f"policy.model_name={qwen3}")
    targets = "policy.lora.target_modules"
    (note,) = preflight(demo(*lora, f"{targets}=[q_proj, v_proj]"), Machine.this, say).notes
    assert str(note) == f"checked      {targets}: the model has q_proj, v_proj"
    with pytest.raises(ConfigError) as raised:
        preflight(demo(*lora, f"{targets}=[q_proj, v_prj]"), Machine.this, say)
    assert "no layer of the model is called v_prj; its linear layers are down_proj, " in str(raised.value)
    critic = ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false")
    of_critic = ("value.backend=fsdp", "value.lora.enabled=true", "value.lora.target_modules=[k_prj]")
    with pytest.raises(ConfigError, match=r"value\.lora\.target_modules=\['k_prj'\]: no layer of the model"):
        preflight(demo(f"policy.model_name={qwen3}", *critic, *of_critic), Machine.this, say)


def test_a_replay_reads_no_data(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text('{"num_prompts_per_step": 1, "num_generations_per_prompt": 1}')
    cfg = demo("data.train.kind=jsonl", "data.train.path=/nowhere.jsonl", f"rollout.replay={tmp_path}")
    assert preflight(cfg, Machine.this, say).notes == []


def test_a_plan_guesses_at_the_file_that_was_meant(demo: Demo, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").touch()
    cfg = demo("data.train.kind=jsonl", f"data.train.path={tmp_path}/trian.jsonl")
    notes = [str(note) for note in preflight(cfg, Machine.another, say).notes]
    there = f"data.train: {tmp_path}/trian.jsonl is not here; did you mean {tmp_path}/train.jsonl?"
    assert f"not checked  {there}" in notes


def test_a_plan_says_what_it_could_not_see(demo: Demo) -> None:
    there_is_none = "kind: jsonl, path: no/such.jsonl, env: arithmetic"
    cfg = demo(
        *(f"data.{section}={{{there_is_none}}}" for section in ("train", "validation")),
        "policy.model_name=models/Qwen3-8B",
    )
    assert [str(note) for note in preflight(cfg, Machine.another, say).notes] == [
        "assumed      policy.model_name: models/Qwen3-8B is not here; its sizes are those shipped in "
        "recipes/shapes",
        "not checked  policy.model_name: weights and tokenizer of models/Qwen3-8B, so no prompt's length",
        "not checked  data.train: no/such.jsonl is not here",
        "not checked  data.validation: no/such.jsonl is not here",
        "not checked  GPUs, memory and disk of the machines that will run it",
    ]


def test_a_critic_adds_its_three_columns_and_reads_those_of_a_kl_in_the_reward(demo: Demo) -> None:
    def columns(*arguments: str) -> set[str]:
        return {column.name for column in preflight(demo(*arguments), Machine.this, say).columns}

    critic = ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false")
    kl = ("loss_fn.use_kl_in_reward=true", "loss_fn.reference_policy_kl_penalty=0.01", SCORED)
    added = {"values", "returns", "token_advantages"}
    assert columns(*critic) - columns() == added
    assert columns(*critic, *kl) - columns() == added | {"prev_logprobs", "reference_logprobs"}
    assert columns(*critic, "rollout.generate_only=true").isdisjoint(added)


def distilled(demo: Demo, model: Path, *keys: str) -> Config:
    teacher = ("teacher=default", f"teacher.model_name={model}", "loss_fn.kind=distillation", SCORED)
    return demo(*teacher, *keys)


def test_the_columns_of_a_teacher_are_in_the_plan_whatever_keys_its_loss_has(
    demo: Demo, checkpoint: Path
) -> None:
    columns = preflight(distilled(demo, checkpoint), Machine.this, say).columns
    assert "teacher_logprobs" in {column.name for column in columns}


def test_a_teacher_is_asked_for_no_more_tokens_than_there_are(demo: Demo, checkpoint: Path) -> None:
    forward = "loss_fn.divergence=forward"
    preflight(distilled(demo, checkpoint, forward, "loss_fn.top_k=64"), Machine.this, say)
    told = (
        r"compares the 65 most likely tokens of the teacher \(top_k\), and the policy has 64 tokens; set "
        r"loss_fn\.top_k to at most 64"
    )
    with pytest.raises(ConfigError, match=told):
        preflight(distilled(demo, checkpoint, forward, "loss_fn.top_k=65"), Machine.this, say)


def test_a_plan_says_which_models_it_could_not_see(demo: Demo) -> None:
    recipe = REPOSITORY / "recipes" / "grpo-qwen3-8b-1n8g.yaml"
    teacher = ("teacher=default", "teacher.model_name=models/Qwen3-30B-A3B", "loss_fn.kind=distillation")
    cfg = load_config(recipe, [*teacher, "data.train.path=none.jsonl", "data.validation.path=none.jsonl"])
    notes = [str(note) for note in preflight(cfg, Machine.another, say).notes]
    assert (
        "assumed      teacher.model_name: models/Qwen3-30B-A3B is not here; its sizes are those shipped in "
        "recipes/shapes"
    ) in notes
    assert (
        "not checked  teacher.model_name: weights and tokenizer of models/Qwen3-30B-A3B, so not whether it "
        "has the policy's vocabulary"
    ) in notes
