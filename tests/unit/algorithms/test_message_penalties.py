from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nemo_like.algorithms.loss_traits import is_advantage_alone, punishes_messages
from nemo_like.algorithms.message_penalties import with_penalties
from nemo_like.tripwires.reference_loss import punished
from tests.unit.algorithms.loss_cases import CONFIG

ADVANTAGES = [0.5, 0.25, -3.0, 2.0]
FLAGS = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("call", "thought", "expected"),
    [
        (-5.0, None, [0.5, -5.0, -3.0, -5.0]),
        (None, -1.0, [0.5, 0.25, -1.0, -1.0]),
        (-5.0, -1.0, [0.5, -5.0, -1.0, -5.0]),
        (None, None, ADVANTAGES),
    ],
)
def test_flagged_tokens_get_the_penalty_and_a_call_comes_first(
    call: float | None, thought: float | None, expected: list[float]
) -> None:
    loss = replace(CONFIG, invalid_tool_call_advantage=call, malformed_thinking_advantage=thought)
    flags = torch.tensor(FLAGS, dtype=torch.uint8)
    assert with_penalties(torch.tensor(ADVANTAGES), flags, loss).tolist() == expected
    values = torch.tensor(ADVANTAGES, dtype=torch.float64)
    found, sizes = punished(values, values.abs(), flags.double(), loss)
    assert found.tolist() == expected
    assert sizes.tolist() == [abs(value) for value in expected]


def test_a_sample_of_advantage_0_may_have_a_gradient_then() -> None:
    loss = replace(CONFIG, malformed_thinking_advantage=-1.0)
    assert punishes_messages(loss)
    assert is_advantage_alone(CONFIG)
    assert not is_advantage_alone(loss)
