"""The steps that epochs come to, with files of some records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.plan.machine_rules import Machine
from nemo_like.plan.run_length import too_many_steps
from nemo_like.preflight.epochs import CountedRun, with_counted_epochs
from scripts.demo_model.tiny_tokenizer import save_tokenizer
from tests.unit.config.checkpoints import DEMO, write_checkpoint

PPO = DEMO.with_name("ppo_arithmetic_cpu.yaml")


def counted(*arguments: str, base: Path = DEMO, machine: Machine = Machine.this) -> CountedRun:
    def load(more: Sequence[str]) -> Config:
        return load_config(base, [*arguments, *more])

    return with_counted_epochs(load, machine)


def records(path: Path, count: int) -> list[str]:
    """The arguments of a run on ``count`` records, and one of more tokens than a prompt may have."""
    long = {"prompt": "1+1=" * 30, "answer": "2"}
    lines = [json.dumps(one) for one in [*[{"prompt": "1+1=", "answer": "2"}] * count, long]]
    path.write_text("\n".join(lines))
    checkpoint = write_checkpoint(path.with_name("checkpoint"))
    save_tokenizer(checkpoint)
    return [
        f"policy.model_name='{checkpoint}'",
        f"data.train=[{{kind: jsonl, path: '{path}'}}]",
        "grpo.num_prompts_per_step=16",
    ]


def test_prompts_that_are_too_long_are_not_counted_and_schedules_follow(tmp_path: Path) -> None:
    # 3 x 40 prompts are 7 steps of 16; 16 x 8 samples are one update of 128.
    follows = ("policy.scheduler.warmup_updates=2", "policy.scheduler.decay_updates=${updates_of_run:policy}")
    found = counted(
        *records(tmp_path / "a.jsonl", 40), "grpo.max_num_epochs=3", "grpo.max_num_steps=9", *follows
    )
    assert found.cfg.grpo.max_num_steps == 7
    assert found.cfg.policy.scheduler.decay_updates == 7
    assert [str(note) for note in found.notes] == [
        "checked      grpo.max_num_epochs=3: 7 steps, which begin with 16 prompts of 40 each"
    ]


def test_steps_come_first_where_they_are_fewer(tmp_path: Path) -> None:
    arguments = [*records(tmp_path / "a.jsonl", 40), "grpo.max_num_epochs=3", "grpo.max_num_steps=5"]
    found = counted(*arguments)
    assert found.cfg.grpo.max_num_steps == 5
    assert "grpo.max_num_steps=5 comes first" in str(found.notes)
    assert counted("grpo.max_num_steps=9").notes == ()


def test_the_critics_schedule_follows_too(tmp_path: Path) -> None:
    follows = ("value.scheduler.warmup_updates=0", "value.scheduler.decay_updates=${updates_of_run:value}")
    found = counted(*records(tmp_path / "a.jsonl", 40), "grpo.max_num_epochs=2", *follows, base=PPO)
    value = found.cfg.value
    assert value is not None
    assert found.cfg.grpo.max_num_steps == 5
    updates = 5 * (16 * found.cfg.grpo.num_generations_per_prompt // value.train_global_batch_size)
    assert value.scheduler.decay_updates == updates * value.num_epochs_per_rollout


def test_a_step_of_dynamic_sampling_counts_the_prompts_with_which_it_begins(tmp_path: Path) -> None:
    several = ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_num_prompts=40")
    found = counted(*records(tmp_path / "a.jsonl", 80), "grpo.max_num_epochs=1", *several)
    assert found.cfg.grpo.max_num_steps == 2


def test_data_that_are_elsewhere_are_not_counted_by_a_plan_and_stop_a_run(tmp_path: Path) -> None:
    away = ("data.train=[{kind: jsonl, path: away.jsonl}]", "grpo.max_num_epochs=3", "grpo.max_num_steps=9")
    planned = counted(*away, machine=Machine.another)
    assert planned.cfg.grpo.max_num_steps == 9
    assert "the steps are those of grpo.max_num_steps" in str(planned.notes[0])
    with pytest.raises(ConfigError, match=r"data\.train\.path=away\.jsonl is not a file"):
        counted(*away)


def test_less_than_a_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"grpo\.max_num_epochs=0\.5 is less than one step of 16 prompts"):
        counted(*records(tmp_path / "a.jsonl", 20), "grpo.max_num_epochs=0.5")


def test_a_run_that_finds_fewer_prompts_than_were_counted_says_so() -> None:
    cfg = load_config(DEMO, ["grpo.max_num_epochs=1", "grpo.max_num_steps=3", "grpo.num_prompts_per_step=16"])
    assert too_many_steps(cfg, [48]) is None
    assert "comes to 2 steps of the 47 training prompts" in str(too_many_steps(cfg, [47]))
    assert too_many_steps(load_config(DEMO, []), [1]) is None
