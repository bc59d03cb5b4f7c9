"""Which teachers go with which students."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like.config.loader import load_config
from nemo_like.config.places import placement
from nemo_like.config.problems import ConfigError
from nemo_like.config.roles import Role, roles, worker_groups
from nemo_like.config.rules import validate
from nemo_like.config.schema import Config, TeacherScoring
from tests.unit.config.checkpoints import DEMO, write_checkpoint

ENGINE = ("teacher.scored_by=engine", "teacher.data_parallel_size=1")


def tokenizer(*words: str) -> str:
    return json.dumps(
        {
            "model": {"vocab": {word: number for number, word in enumerate(words)}},
            "added_tokens": [{"content": "<end>", "id": len(words)}],
        }
    )


@pytest.fixture
def student(tmp_path: Path) -> Path:
    path = write_checkpoint(tmp_path / "student")
    (path / "tokenizer.json").write_text(tokenizer("a", "b"))
    return path


@pytest.fixture
def teacher(tmp_path: Path) -> Path:
    path = write_checkpoint(tmp_path / "teacher", num_hidden_layers=4)
    (path / "tokenizer.json").write_text(tokenizer("a", "b"))
    return path


def distilled(student: Path, teacher: Path, *overrides: str) -> Config:
    there = [f"policy.model_name={student}", f"logger.log_dir={student.parent / 'runs'}"]
    taught = ["teacher=default", f"teacher.model_name={teacher}", "loss_fn.kind=distillation"]
    return load_config(DEMO, [*there, *taught, *overrides])


def problems(cfg: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    return [str(problem) for problem in caught.value.problems]


def test_a_teacher_is_a_group_of_workers_in_a_layout_of_its_own(student: Path, teacher: Path) -> None:
    cfg = distilled(student, teacher, "teacher.megatron_cfg.pipeline_model_parallel_size=2")
    validate(cfg)
    assert cfg.teacher is not None and cfg.teacher.scored_by is TeacherScoring.workers
    assert [*worker_groups(cfg)] == [Role.policy_worker, Role.teacher_worker]
    assert roles(cfg)[Role.teacher_worker].count == 4
    assert {place.actor for place in placement(cfg)} >= {f"teacher_worker-{rank}" for rank in range(4)}


def test_an_engine_is_one_process(student: Path, teacher: Path) -> None:
    cfg = distilled(student, teacher, *ENGINE)
    validate(cfg)
    assert roles(cfg)[Role.teacher_worker].count == 1


def test_a_loss_and_its_teacher_need_each_other(student: Path, teacher: Path) -> None:
    (told,) = problems(distilled(student, teacher, "loss_fn.kind=policy_gradient"))
    assert told.startswith("teacher is a teacher, which nobody asks with loss_fn.kind=policy_gradient")
    there = [f"policy.model_name={student}", f"logger.log_dir={student.parent / 'runs'}"]
    (told,) = problems(load_config(DEMO, [*there, "loss_fn.kind=distillation"]))
    assert told.startswith("loss_fn.kind=distillation needs a teacher")


def test_a_loss_of_ones_own_may_have_a_teacher(student: Path, teacher: Path) -> None:
    validate(distilled(student, teacher, "loss_fn.kind=tests.functional.own_losses:gated"))


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("teacher.lora.enabled=true",), "teacher.lora.enabled=true trains nothing"),
        (("teacher.data_parallel_size=0",), "teacher.data_parallel_size=0 must be at least 1"),
        (
            ("teacher.max_total_sequence_length=40",),
            "teacher.max_total_sequence_length=40 must be that of the policy, 32",
        ),
        (
            ("teacher.train_global_batch_size=100",),
            "teacher.train_global_batch_size=100 must divide the N = 128 prompts x 8 generations",
        ),
        (
            ("teacher.data_parallel_size=1", "teacher.megatron_cfg.tensor_model_parallel_size=3"),
            "teacher.megatron_cfg.tensor_model_parallel_size=3 must divide the model's 4 attention heads",
        ),
        (("teacher.scored_by=engine",), "is one process, and the teacher's layout has 2"),
        (
            (*ENGINE, "generation.temperature=0.9"),
            "teacher.scored_by=engine needs generation.temperature=1, at which vLLM scores given tokens; it "
            "is 0.9",
        ),
    ],
)
def test_keys_that_do_not_go_with_a_teacher_are_told_under_its_name(
    student: Path, teacher: Path, overrides: tuple[str, ...], told: str
) -> None:
    (problem,) = problems(distilled(student, teacher, *overrides))
    assert told in problem


def test_a_teacher_with_another_vocabulary_is_refused_by_name(student: Path, teacher: Path) -> None:
    (teacher / "tokenizer.json").write_text(tokenizer("a", "c"))
    (told,) = problems(distilled(student, teacher))
    assert told.startswith(f"teacher.model_name={teacher} has another vocabulary than policy.model_name")
    assert "at id 1" in told


def test_the_same_vocabulary_may_be_written_otherwise(student: Path, teacher: Path) -> None:
    (teacher / "tokenizer.json").write_text(
        json.dumps({"version": "2", "added_tokens": None, "model": {"vocab": {"<end>": 2, "b": 1, "a": 0}}})
    )
    validate(distilled(student, teacher))


def test_a_vocabulary_that_cannot_be_read_is_refused(student: Path, teacher: Path) -> None:
    (teacher / "tokenizer.json").write_text("{")
    (told,) = problems(distilled(student, teacher))
    assert "each need a tokenizer.json, to compare their vocabularies" in told


def test_a_teacher_may_have_more_tokens_than_its_student_but_not_as_an_engine_and_never_fewer(
    student: Path, teacher: Path
) -> None:
    words = (teacher / "tokenizer.json").read_text()
    write_checkpoint(teacher, vocab_size=128)
    (teacher / "tokenizer.json").write_text(words)
    validate(distilled(student, teacher))
    (told,) = problems(distilled(student, teacher, *ENGINE))
    assert "needs a model of the policy's 64 tokens, and the teacher's has 128" in told
    write_checkpoint(teacher, vocab_size=32)
    (teacher / "tokenizer.json").write_text(words)
    (told,) = problems(distilled(student, teacher))
    assert "has 32 tokens, but the policy samples from 64" in told
