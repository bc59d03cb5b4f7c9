"""What counts as caught in scripts/bench/mutation_score.py."""

from __future__ import annotations

from scripts.bench.mutation_score import caught_by

TRIPPED = """step 1/3  reward 0.1
The run failed: at step 2, tripwire 'loss': it is 1, and not 2
tripwire 'agreement': token_mult_prob_error is 1.1
debug.tripwires=off turns the tripwires off
"""


def test_tripwires_are_read_by_step() -> None:
    assert caught_by(TRIPPED) == {"2": ["agreement", "loss"]}


def test_a_checkpoint_that_a_tripwire_refuses_is_read_by_its_step() -> None:
    text = (
        "The run failed: the checkpoint /runs/a/checkpoints/step_2 could not be written: policy_worker-0: "
        "RuntimeError: tripwire 'stored_weights': the checkpoint has other norms than the model had"
    )
    assert caught_by(text) == {"2": ["stored_weights"]}


def test_another_error_catches_nothing() -> None:
    assert (
        caught_by("step 1/3  reward 0.1\nThe run failed: policy_worker-0.train failed: KeyError: 'x'") == {}
    )
