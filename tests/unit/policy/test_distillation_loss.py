"""The loss of distillation: what it adds to the policy gradient, and which columns its keys read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_like.algorithms.distillation import forward_kl, jensen_shannon, reverse_kl
from nemo_like.algorithms.losses import LossTokens
from nemo_like.batch.columns import TEACHER_LOGPROBS, teacher_topk_columns
from nemo_like.policy.loss.checked_loss import CheckedLoss, own_means, own_reads
from tests.losses import compute
from tests.unit.algorithms.loss_cases import CONFIG, of_kind, tokens

TEACHER = torch.tensor([-1.0, -0.2, -3.0])
TOPK = torch.tensor([[0.6, 0.3], [0.9, 0.05], [0.5, 0.25]]).log()
OWN = torch.tensor([[0.5, 0.4], [0.7, 0.2], [0.1, 0.1]]).log()


def batch(**changes: Any) -> LossTokens:
    """Three tokens that are as likely as they were, the last of a sample that does not train."""
    train = torch.tensor([0.25, 0.5, 0.0])
    fields: dict[str, Any] = {
        "prev_logprobs": torch.tensor([-1.5, -1.0, -1.0]),
        "logprobs": torch.tensor([-1.5, -1.0, -1.0]).requires_grad_(),
        "weights": train,
        "mask": (train > 0).float(),
        "columns": {"teacher_logprobs": TEACHER, "teacher_topk_logprobs": TOPK},
        "topk_logprobs": OWN.clone().requires_grad_(),
    }
    return tokens([1.0, 1.0, 1.0], [2.0, -1.0, 4.0], **(fields | changes))


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    return torch.autograd.grad(loss, of, retain_graph=True)[0]


def test_reverse_is_a_policy_gradient_whose_advantage_is_teacher_minus_student() -> None:
    given = batch()
    terms = compute(given, of_kind("distillation"))
    # Ratios are 1, so a token's gradient is minus its weight times its advantage: 0.5, 0.8 and nothing.
    assert gradient(terms.loss, given.logprobs).tolist() == pytest.approx([-0.25 * 0.5, -0.5 * 0.8, 0.0])
    assert terms.loss.item() == pytest.approx(-0.25 * 0.5 - 0.5 * 0.8)
    mean = terms.means["teacher_divergence"]
    assert mean.values.tolist() == pytest.approx([-0.5, -0.8, 2.0])
    assert mean.weights.tolist() == [1, 1, 0]


def test_reverse_is_mixed_with_the_reward_by_weights() -> None:
    given = batch()
    terms = compute(given, of_kind("distillation", weight=0.5, reward_weight=3.0))
    mixed = [3 * 2 + 0.5 * 0.5, 3 * -1 + 0.5 * 0.8]
    expected = [-0.25 * mixed[0], -0.5 * mixed[1], 0.0]
    assert gradient(terms.loss, given.logprobs).tolist() == pytest.approx(expected)


def test_a_teacher_that_is_the_student_teaches_nothing() -> None:
    given = batch(columns={"teacher_logprobs": torch.tensor([-1.5, -1.0, -1.0])})
    assert gradient(compute(given, of_kind("distillation")).loss, given.logprobs).abs().max() == 0


@pytest.mark.parametrize(
    ("divergence", "apart"),
    [
        ("reverse_topk", reverse_kl(TOPK, OWN)),
        ("forward", forward_kl(TOPK, OWN)),
        ("jensen_shannon", jensen_shannon(TOPK, OWN, 0.3)),
    ],
)
def test_a_divergence_over_likely_tokens_is_added_with_the_same_shares(
    divergence: str, apart: Tensor
) -> None:
    given = batch()
    own = {"divergence": divergence, "weight": 2.0, "reward_weight": 0.5, "beta": 0.3, "top_k": 2}
    terms = compute(given, of_kind("distillation", own))
    rewarded = compute(replace(given, advantages=0.5 * given.advantages), CONFIG)
    assert terms.loss.item() == pytest.approx(rewarded.loss.item() + 2 * float((given.weights * apart).sum()))
    torch.testing.assert_close(gradient(terms.loss, given.logprobs), gradient(rewarded.loss, given.logprobs))
    slope = gradient(terms.loss, given.topk_logprobs)
    assert slope[:2].abs().min() > 0
    assert slope[2].abs().max() == 0
    torch.testing.assert_close(terms.means["teacher_divergence"].values, apart)
    assert not terms.means["teacher_divergence"].values.requires_grad


@pytest.mark.parametrize("kind", ["policy_gradient", "gspo", "gspo_token", "cispo", "reinforce"])
def test_the_loss_by_rewards_is_that_of_the_kind_it_names(kind: str) -> None:
    given = batch(prev_logprobs=torch.tensor([-1.9, -0.9, -1.0]), response_lengths=torch.tensor([2.0, 1.0]))
    given = replace(given, sample_index=torch.tensor([0, 0, 1]))
    terms = compute(given, of_kind("distillation", divergence="forward", reward_weight=0.5, policy_loss=kind))
    rewarded = compute(replace(given, advantages=0.5 * given.advantages), of_kind(kind))
    apart = (given.weights * forward_kl(TOPK, OWN)).sum()
    assert terms.loss.item() == pytest.approx(rewarded.loss.item() + apart.item())
    torch.testing.assert_close(gradient(terms.loss, given.logprobs), gradient(rewarded.loss, given.logprobs))
    assert terms.ratio.tolist() == rewarded.ratio.tolist()
    assert terms.clipped_ratio.tolist() == rewarded.clipped_ratio.tolist()
    assert terms.means.keys() == {*rewarded.means, "teacher_divergence"}


def test_the_keys_decide_what_is_read() -> None:
    def reads(**own: Any) -> tuple[Any, ...]:
        return own_reads(of_kind("distillation", own))

    assert reads() == reads(divergence="reverse", weight=2.0) == (TEACHER_LOGPROBS,)
    assert reads(divergence="forward", top_k=4) == teacher_topk_columns(4)
    assert [column.inner_shape for column in reads(divergence="jensen_shannon", beta=0.3)] == [(32,), (32,)]


def test_it_goes_through_the_door_of_all_losses() -> None:
    cfg = of_kind("distillation", divergence="jensen_shannon", top_k=2)
    given = batch(columns={})
    columns = {"teacher_topk_ids": torch.zeros(3, 2, dtype=torch.int32), "teacher_topk_logprobs": TOPK}
    terms = CheckedLoss(cfg)(given, columns, torch.arange(3))
    assert terms.loss.item() == pytest.approx(float((given.weights * jensen_shannon(TOPK, OWN, 0.5)).sum()))
    assert own_means(cfg) == ("teacher_divergence",)


def test_an_unknown_divergence_and_a_backend_without_the_logprobs_are_errors() -> None:
    with pytest.raises(ValueError, match="divergence=forwards must be one of reverse, reverse_topk, forward"):
        compute(batch(), of_kind("distillation", divergence="forwards"))
    with pytest.raises(ValueError, match="no log-probs of the teacher's 2 most likely tokens"):
        compute(batch(topk_logprobs=None), of_kind("distillation", divergence="forward", top_k=2))
