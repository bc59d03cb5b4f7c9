"""Log-ratios far beyond what float32 can exponentiate: losses, gradients and metrics stay finite."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.divergence import divergences
from nemo_like.algorithms.options import ImportanceSamplingType, KLType, LossConfig
from tests.losses import compute
from tests.unit.algorithms.loss_cases import CONFIG, GSPO, of_kind, tokens

E20 = math.exp(20)
CORRECTED = replace(CONFIG, use_importance_sampling_correction=True)
BOUNDED = replace(
    CORRECTED, truncated_importance_sampling_ratio=5.0, truncated_importance_sampling_ratio_min=0.5
)
SURROGATES = {
    "PPO": CONFIG,
    "dual clip": of_kind("policy_gradient", ratio_clip_c=3.0),
    "GSPO": GSPO,
    "CISPO": of_kind("cispo"),
    "REINFORCE": of_kind("reinforce"),
}
LOSSES = {
    **SURROGATES,
    **{f"PPO with {kind.name}": replace(CONFIG, reference_policy_kl_type=kind) for kind in KLType},
    "raw correction": CORRECTED,
    "GSPO with raw correction": replace(GSPO, use_importance_sampling_correction=True),
    **{
        kind.name: replace(BOUNDED, truncated_importance_sampling_type=kind)
        for kind in ImportanceSamplingType
    },
}
# Far beyond what a log-softmax says of a token, and where exp begins to overflow.
logprob = st.floats(-1e9, 0.0) | st.floats(-200.0, 0.0)


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=60)
@given(
    rows=st.lists(st.tuples(logprob, logprob, logprob, logprob), min_size=3, max_size=3),
    advantages=st.lists(st.sampled_from([0.0, 1.0, -1.0, 7.5, -7.5]), min_size=2, max_size=2),
)
@example(rows=[(-0.5, -90.0, -0.5, -0.5)] * 3, advantages=[0.0, -1.0])
@example(rows=[(-0.5, -1e9, -1e9, -0.1)] * 3, advantages=[0.0, 1.0])
def test_no_log_ratio_makes_a_loss_or_gradient_that_is_no_number(
    name: str, rows: list[tuple[float, ...]], advantages: list[float]
) -> None:
    current, prev, generation, reference = torch.tensor(rows).T
    batch = tokens(
        [1.0] * 3,
        [advantages[0], advantages[0], advantages[1]],
        lengths=[2, 1],
        logprobs=current.clone().requires_grad_(),
        prev_logprobs=prev,
        generation_logprobs=generation,
        reference_logprobs=reference,
    )
    terms = compute(batch, replace(LOSSES[name], reference_policy_kl_penalty=0.1))
    terms.loss.backward()
    found = {
        "loss": terms.loss,
        "gradient": batch.logprobs.grad,
        "ratio": terms.ratio,
        **{name: mean.values for name, mean in terms.means.items()},
    }
    assert {name: values for name, values in found.items() if not values.isfinite().all()} == {}


def gradient(cfg: LossConfig, log_ratio: float, advantage: float) -> tuple[float, float]:
    """Loss and its derivative by the log-prob, of one token."""
    logprobs = torch.tensor([-0.5], requires_grad=True)
    batch = tokens([1.0], [advantage], logprobs=logprobs, prev_logprobs=logprobs.detach() - log_ratio)
    loss = compute(batch, cfg).loss
    loss.backward()
    return loss.item(), logprobs.grad.item()


@pytest.mark.parametrize("cfg", [CONFIG, GSPO], ids=["PPO", "GSPO"])
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [
        (19.0, -2.0, (2 * math.exp(19), 2 * math.exp(19))),
        # Beyond the limit the ratio stays at e^20, and nothing flows.
        (21.0, -2.0, (2 * E20, 0.0)),
        (500.0, -2.0, (2 * E20, 0.0)),
        # What is clipped anyway is not affected.
        (500.0, 2.0, (-2.56, 0.0)),
        (-500.0, 2.0, (-2 / E20, 0.0)),
        (-500.0, -2.0, (1.6, 0.0)),
        (500.0, 0.0, (0.0, 0.0)),
    ],
)
def test_a_ratio_is_limited_to_e_to_the_twenty(
    cfg: LossConfig, log_ratio: float, advantage: float, expected: tuple[float, float]
) -> None:
    assert gradient(cfg, log_ratio, advantage) == pytest.approx(expected, rel=1e-4)


def test_dual_clip_bounds_what_the_limit_lets_through() -> None:
    assert gradient(SURROGATES["dual clip"], 500.0, -2.0) == (6.0, 0.0)


def test_figures_of_engine_and_trainer_are_finite_however_far_apart_they_are() -> None:
    trainer, generation = torch.tensor([-0.5, -900.0, -1e9]), torch.tensor([-900.0, -0.5, 0.0])
    found = divergences(trainer, generation)
    assert found["token_mult_prob_error"].tolist() == pytest.approx([E20] * 3, rel=1e-5)
    assert found["sampling_importance_ratio"].tolist() == pytest.approx([E20, 1 / E20, 1 / E20], rel=1e-5)
    assert found["gen_kl_error"].tolist() == pytest.approx([E20 - 21, 19, 19], rel=1e-5)
    assert all(values.isfinite().all() for values in found.values())


def test_a_logprob_that_is_no_number_stays_none() -> None:
    # It must reach the mask that takes its sample out.
    assert divergences(torch.tensor([math.nan]), torch.tensor([-1.0]))["token_mult_prob_error"].isnan()
