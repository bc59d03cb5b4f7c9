"""What a policy worker asks of its backend in a log-prob phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.batch.columns import ENTROPIES, PREV_LOGPROBS, REFERENCE_LOGPROBS, Column
from nemo_like.policy.workers.worker import PolicyWorker


class Passes:
    """A backend of two tokens that notes which passes it made."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def logprobs(self, *_: Any) -> Tensor:
        self.made.append("logprobs")
        return torch.tensor([-1.0, -2.0])

    def scores_with_entropy(self, *_: Any) -> TokenScores:
        self.made.append("scores_with_entropy")
        return TokenScores(logprobs=torch.tensor([-1.0, -2.0]), entropy=torch.tensor([0.5, 0.25]))

    def reference_logprobs(self, *_: Any) -> Tensor:
        self.made.append("reference_logprobs")
        return torch.tensor([-3.0, -4.0])


@pytest.mark.parametrize(
    ("columns", "passes"),
    [
        ([PREV_LOGPROBS], ["logprobs"]),
        ([PREV_LOGPROBS, ENTROPIES], ["scores_with_entropy"]),
        ([PREV_LOGPROBS, REFERENCE_LOGPROBS, ENTROPIES], ["scores_with_entropy", "reference_logprobs"]),
        ([REFERENCE_LOGPROBS], ["reference_logprobs"]),
    ],
)
def test_entropies_come_from_the_pass_that_gives_logprobs(
    columns: Sequence[Column], passes: list[str]
) -> None:
    worker = PolicyWorker.__new__(PolicyWorker)
    worker._backend = backend = Passes()
    values = {PREV_LOGPROBS: [-1.0, -2.0], ENTROPIES: [0.5, 0.25], REFERENCE_LOGPROBS: [-3.0, -4.0]}
    scored = worker._scored(None, None, columns)
    assert {column: one.tolist() for column, one in scored.items()} == {one: values[one] for one in columns}
    assert backend.made == passes
