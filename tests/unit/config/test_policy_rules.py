from __future__ import annotations

from collections.abc import Callable

import pytest

from nemo_like.config.errors import ConfigError
from nemo_like.config.schema import Config
from nemo_like.config.validation import validate

Demo = Callable[..., Config]

PACKING = "policy.sequence_packing"
DYNAMIC = "policy.dynamic_batching"


def problems(cfg: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(cfg)
    return [str(problem) for problem in caught.value.problems]


def test_packing_and_dynamic_batches_exclude_each_other(demo: Demo) -> None:
    (problem,) = problems(demo(f"{PACKING}.enabled=true", f"{DYNAMIC}.enabled=true"))
    assert problem.startswith(f"{DYNAMIC}.enabled=true excludes {PACKING}.enabled=true")


@pytest.mark.parametrize("section", [PACKING, DYNAMIC])
def test_a_token_budget_must_hold_the_longest_sample(demo: Demo, section: str) -> None:
    budgets = (f"{section}.train_mb_tokens=31", f"{section}.logprob_mb_tokens=100")
    cfg = demo(f"{section}.enabled=true", f"{DYNAMIC}.sequence_length_round=1", *budgets)
    (problem,) = problems(cfg)
    assert problem == (
        f"{section}.train_mb_tokens=31 must hold a sample of policy.max_total_sequence_length=32 tokens; "
        "try 32 or more"
    )
    validate(demo(*budgets))  # not enabled


def test_a_token_budget_must_hold_the_longest_sample_after_rounding(demo: Demo) -> None:
    cfg = demo(
        f"{DYNAMIC}.enabled=true", f"{DYNAMIC}.sequence_length_round=20", f"{DYNAMIC}.train_mb_tokens=39"
    )
    (problem,) = problems(cfg)
    assert "32 tokens, rounded up to a multiple of 20; try 40 or more" in problem


def test_lengths_must_divide_into_what_sequence_and_context_parallelism_make_of_them(demo: Demo) -> None:
    axes = "policy.megatron_cfg"
    cfg = demo(
        f"{axes}.tensor_model_parallel_size=2",
        f"{axes}.sequence_parallel=true",
        f"{axes}.context_parallel_size=2",
        "policy.max_total_sequence_length=60",
    )
    (problem,) = problems(cfg)
    assert problem == (
        "policy.max_total_sequence_length=60 must be a multiple of 8, into which sequence and context "
        "parallelism cut it; try 56 or 64"
    )


def test_the_optimizer_can_leave_the_device_only_where_it_has_weights_of_its_own(demo: Demo) -> None:
    offload = "policy.offload_optimizer_for_logprob=true"
    (problem,) = problems(demo(offload))
    assert problem.startswith(f"{offload} needs policy.device=cuda")
    (problem,) = [
        text for text in problems(demo(offload, "policy.device=cuda")) if text.startswith("policy.offload")
    ]
    assert "policy.precision=bfloat16" in problem


def test_parameters_can_only_leave_a_gpu(demo: Demo) -> None:
    (problem,) = problems(demo("policy.offload_parameters_between_phases=true"))
    assert problem == (
        "policy.offload_parameters_between_phases=true needs policy.device=cuda, where there is a host to "
        "move to; set it to false"
    )
