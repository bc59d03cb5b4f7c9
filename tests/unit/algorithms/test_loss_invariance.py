"""Loss, gradient and metrics of a global batch are the same however it is cut into micro-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.algorithms.losses import GlobalCounts, LossTerms, LossTokens, token_weights
from nemo_like.algorithms.options import ImportanceSamplingType, LossConfig
from tests.losses import compute
from tests.unit.algorithms.loss_cases import CONFIG, GSPO, of_kind, sample_index

CORRECTED: dict[str, Any] = {
    "use_importance_sampling_correction": True,
    "truncated_importance_sampling_ratio": 2.0,
    "truncated_importance_sampling_ratio_min": 0.5,
}
LOSSES = {
    "token level": CONFIG,
    "sequence level, dual clip, KL": of_kind(
        "policy_gradient", token_level_loss=False, ratio_clip_c=2.0, reference_policy_kl_penalty=0.3
    ),
    "Dr.GRPO": replace(CONFIG, token_level_loss=False, sequence_length_normalizer=7),
    "GSPO": GSPO,
    "GSPO, corrected": replace(
        GSPO, truncated_importance_sampling_type=ImportanceSamplingType.tis, **CORRECTED
    ),
    "CISPO": of_kind("cispo", reference_policy_kl_penalty=0.3),
    "REINFORCE with entropy bonus": of_kind("reinforce", entropy_coef=0.1),
    "raw correction": replace(CONFIG, use_importance_sampling_correction=True),
    **{
        kind.name: replace(CONFIG, truncated_importance_sampling_type=kind, **CORRECTED)
        for kind in ImportanceSamplingType
    },
}


class GlobalBatch:
    """Random samples of which some do not train."""

    def __init__(self, lengths: list[int], cfg: LossConfig, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        num_tokens = sum(lengths)
        self.lengths, self.cfg = lengths, cfg
        self.mask = torch.randint(0, 2, (len(lengths),), generator=generator).float()
        self.start, self.prev, self.reference, self.generation = torch.randn(
            4, num_tokens, generator=generator
        )
        self.start_entropy = torch.rand(num_tokens, generator=generator)
        self.advantages = torch.randn(len(lengths), generator=generator)
        self.counts = GlobalCounts(
            num_tokens=sum(length for length, valid in zip(lengths, self.mask, strict=True) if valid),
            num_samples=int(self.mask.sum()),
        )

    def terms(self, logprobs: Tensor, entropy: Tensor, samples: range) -> LossTerms:
        """The loss of these samples, whose tokens are taken out of those of the whole batch."""
        lengths = [self.lengths[sample] for sample in samples]
        owner = sample_index(self.lengths)
        here = (owner >= samples.start) & (owner < samples.stop)
        index, sizes = sample_index(lengths), torch.tensor(lengths, dtype=torch.float32)
        own = slice(samples.start, samples.stop)
        tokens = LossTokens(
            logprobs=logprobs[here],
            prev_logprobs=self.prev[here],
            advantages=self.advantages[own][index],
            weights=token_weights(index, self.mask[own], sizes, self.counts, self.cfg),
            mask=self.mask[own][index],
            sample_index=index,
            response_lengths=sizes,
            reference_logprobs=self.reference[here] if self.cfg.reference_policy_kl_penalty else None,
            generation_logprobs=self.generation[here],
            entropy=entropy[here] if self.cfg.entropy_coef else None,
        )
        return compute(tokens, self.cfg)

    def run(self, cuts: list[range]) -> tuple[Tensor, Tensor, Tensor, dict[str, float]]:
        """Loss, its gradients with respect to log-probs and entropy, and the means over all parts."""
        logprobs, entropy = self.start.clone().requires_grad_(), self.start_entropy.clone().requires_grad_()
        parts = [self.terms(logprobs, entropy, samples) for samples in cuts]
        loss = torch.stack([part.loss for part in parts]).sum()
        (loss + 0 * entropy.sum()).backward()
        means = {}
        for name in parts[0].means:
            weight = sum(float(part.means[name].weights.sum()) for part in parts)
            total = sum(float((part.means[name].values * part.means[name].weights).sum()) for part in parts)
            means[name] = total / weight if weight else 0.0
        return loss.detach(), logprobs.grad, entropy.grad, means


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    cuts=st.lists(st.integers(0, 6), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_no_cut_into_micro_batches_or_ranks_changes_loss_gradient_or_means(
    name: str, lengths: list[int], cuts: list[int], seed: int
) -> None:
    batch = GlobalBatch(lengths, LOSSES[name], seed)
    edges = sorted({0, len(lengths), *(min(cut, len(lengths)) for cut in cuts)})
    loss, grad, entropy_grad, means = batch.run([range(len(lengths))])
    parts = batch.run([range(first, last) for first, last in pairwise(edges)])
    torch.testing.assert_close(parts[0], loss)
    torch.testing.assert_close(parts[1], grad)
    torch.testing.assert_close(parts[2], entropy_grad)
    assert parts[3] == pytest.approx(means)


@pytest.mark.parametrize("name", LOSSES)
def test_samples_that_do_not_train_have_no_gradient(name: str) -> None:
    batch = GlobalBatch([3, 2, 4, 1], LOSSES[name], seed=3)
    batch.mask = torch.tensor([1.0, 0.0, 1.0, 0.0])
    _, grad, entropy_grad, _ = batch.run([range(4)])
    trains = batch.mask[sample_index(batch.lengths)] > 0
    assert grad[~trains].abs().max() == 0
    assert entropy_grad[~trains].abs().max() == 0
    assert grad[trains].abs().max() > 0
