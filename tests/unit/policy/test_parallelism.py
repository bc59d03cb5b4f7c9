"""Each way to make micro-batches is one that the configuration names."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.batch.micro_batches import Prompt
from nemo_like.configuration import load_config
from nemo_like.policy.groups.parallelism import logprob_strategy, train_strategy
from tests.unit.config.checkpoints import PADDED

ROOT = Path(__file__).resolve().parents[3]
LENGTHS = [[20, 3, 5, 18]]
PROMPTS = [[Prompt(0, 3), Prompt(1, 2), Prompt(1, 2), Prompt(0, 3)]]
SIZES = ["policy.train_micro_batch_size=2", "policy.logprob_batch_size=4"]
BUDGETS = [
    f"policy.{kind}.{name}={tokens}"
    for kind in ("dynamic_batching", "sequence_packing")
    for name, tokens in (("train_mb_tokens", 36), ("logprob_mb_tokens", 64))
]


@pytest.mark.parametrize(
    ("override", "train", "logprob"),
    [
        ("policy.micro_batch_order=by_length", [[0, 3], [2, 1]], [[0, 3, 2, 1]]),
        ("policy.micro_batch_order=as_sampled", [[0, 1], [2, 3]], [[0, 1, 2, 3]]),
        ("policy.dynamic_batching.enabled=true", [[0], [3], [2, 1]], [[0, 3, 2], [1]]),
        ("policy.sequence_packing.enabled=true", [[0, 2, 1], [3]], [[0, 3, 2, 1]]),
        # 20 + 18 - 3 tokens of the first group fit into 36, and 5 + 3 - 2 of the second beside them into 64.
        ("policy.sequence_packing={enabled: true, share_prompts: true}", [[0, 3], [1, 2]], [[0, 3, 1, 2]]),
    ],
)
def test_the_configuration_says_which_samples_share_a_micro_batch(
    override: str, train: list[list[int]], logprob: list[list[int]]
) -> None:
    rounding = "policy.dynamic_batching.sequence_length_round=4"
    cfg = load_config(
        ROOT / "configs" / "grpo_arithmetic_cpu.yaml", [*PADDED, override, rounding, *SIZES, *BUDGETS]
    ).policy
    for strategy, expected in ((train_strategy(cfg), train), (logprob_strategy(cfg), logprob)):
        (planned,) = strategy.micro_batches(LENGTHS, PROMPTS)
        assert [list(micro_batch.rows) for micro_batch in planned] == expected
