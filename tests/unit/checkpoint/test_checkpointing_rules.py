from __future__ import annotations

from nemo_like.checkpoint.checkpointing_rules import checkpointing_problems
from nemo_like.configuration import load_config
from tests.unit.config.checkpoints import DEMO


def test_parts_of_a_checkpoint_that_no_key_names_are_refused() -> None:
    alone = load_config(DEMO, ["checkpointing.resume_parts=weights"])
    (problem,) = checkpointing_problems(alone.checkpointing)
    assert problem.key == "checkpointing.resume_parts=weights"
    assert "checkpointing.resume_from_path, which is null" in problem.rule
    there = [
        "checkpointing.resume_parts=weights",
        "checkpointing.resume_from_path=/runs/a/checkpoints/step_4",
    ]
    assert not [*checkpointing_problems(load_config(DEMO, there).checkpointing)]
