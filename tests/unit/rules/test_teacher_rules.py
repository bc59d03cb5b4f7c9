"""Which teachers go with which students."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nemo_like.algorithms.options import StepShape
from nemo_like.batch.recordings import RecordingManifest, rollout_file, write_manifest
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.plan.derived import groups_per_part
from nemo_like.plan.places import placement
from nemo_like.plan.roles import Role, roles, worker_groups
from nemo_like.policy.options import TeacherScoring
from nemo_like.rules.rules import validate
from tests.unit.config.checkpoints import DEMO, PADDED, SCORED, write_checkpoint

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
        (("teacher.data_parallel_size=0",), "teacher.data_parallel_size=0 must be at least 1"),
        (
            ("teacher.max_total_sequence_length=40",),
            "teacher.max_total_sequence_length=40 must be that of the policy, 32",
        ),
        (
            ("teacher.data_parallel_size=3",),
            "teacher.data_parallel_size=3 must divide the 1024 samples of a step",
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


# Further models, by task

TWO_TASKS = ("env@env.logic=exact_match", "data.train=[{name: sums}, {name: puzzles, env: logic}]")


@pytest.fixture
def logician(tmp_path: Path) -> Path:
    """A checkpoint of the teacher's architecture, but for what says nothing of how it scores."""
    path = write_checkpoint(tmp_path / "logician", num_hidden_layers=4, dtype="bfloat16", eos_token_id=[1, 2])
    (path / "tokenizer.json").write_text(tokenizer("a", "b"))
    return path


def test_a_task_may_have_a_teacher_of_its_own(student: Path, teacher: Path, logician: Path) -> None:
    cfg = distilled(student, teacher, *TWO_TASKS, f"teacher.models={{logic: {logician}}}")
    validate(cfg)
    assert cfg.teacher is not None and cfg.teacher.models == {"logic": str(logician)}


def test_a_teacher_of_a_task_that_no_training_data_has_is_refused(
    student: Path, teacher: Path, logician: Path
) -> None:
    (told,) = problems(distilled(student, teacher, *TWO_TASKS, f"teacher.models={{logik: {logician}}}"))
    assert told == (
        "teacher.models.logik is no task of the training data, whose sources name arithmetic, logic; did you "
        "mean logic?"
    )
    (told,) = problems(distilled(student, teacher, f"teacher.models={{logic: {logician}}}"))
    assert told.startswith(
        "teacher.models.logic is no task of the training data, whose sources name arithmetic;"
    )
    assert "a task is named as its environment" in told


def test_an_engine_holds_one_model(student: Path, teacher: Path, logician: Path) -> None:
    models = f"teacher.models={{arithmetic: {logician}}}"
    (told,) = problems(distilled(student, teacher, *ENGINE, models))
    assert told == (
        "teacher.scored_by=engine holds one model, and teacher.models has arithmetic; set "
        "teacher.scored_by=workers, which put one model after the other in place"
    )


def test_a_further_checkpoint_must_be_there_and_be_whole(
    student: Path, teacher: Path, logician: Path
) -> None:
    key = "teacher.models.arithmetic"
    (told,) = problems(distilled(student, teacher, f"{key}=nowhere"))
    assert told.startswith(f"{key}=nowhere is not a directory")
    (logician / "model.safetensors").unlink()
    (told,) = problems(distilled(student, teacher, f"{key}={logician}"))
    assert told.startswith(f"{key}={logician} has no weights")
    (logician / "config.json").unlink()
    told = "\n".join(problems(distilled(student, teacher, f"{key}={logician}")))
    assert f"{key}={logician} has no config.json" in told


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"num_hidden_layers": 3}, "num_hidden_layers=3 and not 4"),
        ({"num_hidden_layers": 4, "rope_theta": 500.0}, "rope_theta=500.0 and not null"),
        ({"num_hidden_layers": 4, "vocab_size": 128}, "vocab_size=128 and not 64"),
    ],
)
def test_a_further_checkpoint_must_have_the_teachers_architecture(
    student: Path, teacher: Path, logician: Path, changes: dict[str, object], told: str
) -> None:
    write_checkpoint(logician, **changes)
    (logician / "tokenizer.json").write_text(tokenizer("a", "b"))
    (problem,) = problems(distilled(student, teacher, f"teacher.models.arithmetic={logician}"))
    assert problem.startswith(f"teacher.models.arithmetic={logician} must have the architecture of")
    assert told in problem


def test_a_further_checkpoint_must_have_the_policys_vocabulary(
    student: Path, teacher: Path, logician: Path
) -> None:
    (logician / "tokenizer.json").write_text(tokenizer("a", "c"))
    (told,) = problems(distilled(student, teacher, f"teacher.models.arithmetic={logician}"))
    assert told.startswith(
        f"teacher.models.arithmetic={logician} has another vocabulary than policy.model_name"
    )


@pytest.mark.parametrize(
    ("tasks", "told"),
    [
        (["arithmetic", "logic"], None),
        (["arithmetic"], "teacher.models.logic is no task of the recording"),
        (None, "teacher.models needs the tasks of samples, which the recording"),
    ],
)
def test_a_replay_needs_a_recording_of_the_tasks(
    student: Path, teacher: Path, logician: Path, tmp_path: Path, tasks: list[str] | None, told: str | None
) -> None:
    manifest = RecordingManifest(step_shape=StepShape(128, 8), tasks=tasks)
    write_manifest(tmp_path, manifest)
    (tmp_path / rollout_file(1, 0)).touch()
    cfg = distilled(
        student,
        teacher,
        *TWO_TASKS,
        f"teacher.models={{logic: {logician}}}",
        *(f"rollout.replay={tmp_path}", "grpo.max_num_steps=1", "policy.scheduler.decay_style=constant"),
        *("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    )
    if told is None:
        validate(cfg)
    else:
        (problem,) = problems(cfg)
        assert problem.startswith(told)


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


def test_an_engine_that_scores_needs_a_position_more_than_a_sample_has(student: Path, teacher: Path) -> None:
    length = "policy.max_total_sequence_length=256"
    validate(distilled(student, teacher, length))
    (told,) = problems(distilled(student, teacher, length, *ENGINE))
    assert "needs a model of more than policy.max_total_sequence_length=256 positions" in told
    validate(distilled(student, teacher, "policy.max_total_sequence_length=255", *ENGINE))


def test_an_engine_on_cpus_needs_attention_heads_of_a_size_that_it_knows(
    student: Path, teacher: Path
) -> None:
    write_checkpoint(teacher, head_dim=24)
    (teacher / "tokenizer.json").write_text(tokenizer("a", "b"))
    validate(distilled(student, teacher))
    (told,) = problems(distilled(student, teacher, *ENGINE))
    assert told.startswith("teacher.scored_by=engine needs attention heads of another size than 24")


def test_parts_of_a_step_divide_over_the_replicas_of_policy_and_teacher(student: Path, teacher: Path) -> None:
    exact = ("grpo.overlap=exact", "grpo.samples_kept_together=1", "teacher.data_parallel_size=3")
    apart = ("policy.sequence_packing.share_prompts=false", SCORED)
    even = ("grpo.num_prompts_per_step=36", "policy.train_global_batch_size=72", "generation.num_engines=1")
    cfg = distilled(student, teacher, *exact, *apart, *even)
    validate(cfg)
    assert groups_per_part(cfg) == 6
    told = problems(distilled(student, teacher, *exact, *apart))
    assert any(
        "must be a multiple of policy.data_parallel_size=2 and of teacher.data_parallel_size=3 with" in one
        for one in told
    )


@pytest.mark.parametrize("group", ["policy", "teacher"])
def test_a_layout_of_nothing_is_told_by_its_key(student: Path, teacher: Path, group: str) -> None:
    axis = f"{group}.megatron_cfg.tensor_model_parallel_size"
    assert any(
        one.startswith(f"{axis}=0 must be") for one in problems(distilled(student, teacher, f"{axis}=0"))
    )


def test_a_teachers_replicas_divide_the_samples_of_a_step_and_nothing_else(
    student: Path, teacher: Path
) -> None:
    step = ("grpo.num_prompts_per_step=12", "grpo.num_generations_per_prompt=4")
    trained = (*step, "policy.train_global_batch_size=6", SCORED, *PADDED, "grpo.samples_kept_together=1")
    validate(distilled(student, teacher, *trained, "teacher.data_parallel_size=4"))
    (told,) = problems(distilled(student, teacher, *trained, "teacher.data_parallel_size=5"))
    assert told.startswith("teacher.data_parallel_size=5 must divide the 48 samples of a step")
