from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.algorithms.options import StepShape
from nemo_like.batch.recordings import MANIFEST, RecordingManifest, rollout_file, write_manifest
from nemo_like.configuration import Config
from nemo_like.plan.roles import Role, roles
from nemo_like.rules.rollout_rules import rollout_problems

Demo = Callable[..., Config]
NO_VALIDATION = ("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false")


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """Of the demo's two first steps."""
    directory = tmp_path / "recorded"
    directory.mkdir()
    manifest = RecordingManifest(step_shape=StepShape(128, 8))
    write_manifest(directory, manifest)
    for step in (1, 2):
        (directory / rollout_file(step, 0)).touch()
    return directory


def problems(cfg: Config) -> list[str]:
    return [str(problem) for problem in rollout_problems(cfg)]


def test_a_recording_of_enough_steps_can_be_replayed(demo: Demo, recording: Path) -> None:
    assert problems(demo(f"rollout.replay={recording}", "grpo.max_num_steps=2", *NO_VALIDATION)) == []


def test_a_replay_cannot_validate(demo: Demo, recording: Path) -> None:
    (problem,) = problems(demo(f"rollout.replay={recording}", "grpo.max_num_steps=2"))
    assert "has no engines to validate with" in problem
    assert problem.endswith("set grpo.val_period=0 grpo.val_at_start=false grpo.val_at_end=false")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("grpo.max_num_steps=3",), "grpo.max_num_steps=3 needs step 3, which the recording"),
        (("grpo.num_prompts_per_step=64",), "grpo.num_prompts_per_step=64 must be 128, as in the recording"),
        (("grpo.num_generations_per_prompt=4",), "grpo.num_generations_per_prompt=4 must be 8, as in"),
        (("rollout.record=true",), "rollout.record=true cannot be together with rollout.replay"),
        (("rollout.dump_period=2",), "rollout.dump_period=2 cannot be together with rollout.replay"),
        (("rollout.dump_validation=true",), "rollout.dump_validation=true cannot be together with"),
        (("rollout.keep_messages=true",), "rollout.keep_messages=true cannot be together with"),
        (("rollout.generate_only=true",), "rollout.generate_only=true cannot be together with"),
    ],
)
def test_what_does_not_fit_the_recording_is_refused(
    demo: Demo, recording: Path, arguments: tuple[str, ...], expected: str
) -> None:
    replay = (f"rollout.replay={recording}", "grpo.max_num_steps=2", *NO_VALIDATION)
    (problem,) = problems(demo(*replay, *arguments))
    assert problem.startswith(expected)


def test_a_directory_without_a_recording_is_refused(demo: Demo, tmp_path: Path) -> None:
    (problem,) = problems(demo(f"rollout.replay={tmp_path}", *NO_VALIDATION))
    assert "must be a recording" in problem
    assert "rollout.record=true" in problem


def test_a_negative_period_is_refused(demo: Demo) -> None:
    assert problems(demo("rollout.dump_period=-1")) == ["rollout.dump_period=-1 must be at least 0"]


def test_a_replay_starts_no_engines_and_no_environments(demo: Demo) -> None:
    needs = roles(demo("rollout.replay=somewhere"))
    assert needs[Role.engine].count == needs[Role.environment].count == 0
    assert needs[Role.policy_worker].count == 2


def test_generation_alone_starts_no_policy_workers(demo: Demo) -> None:
    needs = roles(demo("rollout.generate_only=true"))
    assert needs[Role.policy_worker].count == 0
    assert needs[Role.engine].count == 2


def test_routers_replay_only_a_recording_that_has_the_experts(demo: Demo, recording: Path) -> None:
    key = "policy.megatron_cfg.router_replay=true"
    replay = (f"rollout.replay={recording}", "grpo.max_num_steps=2", *NO_VALIDATION)
    (problem,) = problems(demo(*replay, key))
    assert problem == (
        f"{key} needs the column 'routed_experts', which the recording {recording} lacks; set it to false, "
        "or record with it"
    )
    manifest = json.loads((recording / MANIFEST).read_text())
    manifest["columns"] = [{"name": "routed_experts"}]
    (recording / MANIFEST).write_text(json.dumps(manifest))
    assert problems(demo(*replay, key)) == []
