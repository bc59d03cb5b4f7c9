"""The model side of the plain loops that ours is measured against: Hugging Face and torch's AdamW."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.options import ClippedLossConfig, LossConfig
from nemo_like.policy.options import PolicyConfig


class PlainModel:
    """A model and its optimizer, as one would set them up without a framework."""

    def __init__(self, policy: PolicyConfig, loss: LossConfig) -> None:
        assert isinstance(loss, ClippedLossConfig), "this loop clips the ratio"
        self._loss, self._max_grad_norm = loss, policy.max_grad_norm
        self.model = AutoModelForCausalLM.from_pretrained(policy.model_name, dtype=torch.float32)
        adam = policy.optimizer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=adam.lr,
            betas=(adam.adam_beta1, adam.adam_beta2),
            eps=adam.adam_eps,
            weight_decay=adam.weight_decay,
        )

    def clipped_loss(self, logprobs: Tensor, prev_logprobs: Tensor, advantages: Tensor) -> Tensor:
        """Per token, of any shape."""
        ratio = (logprobs - prev_logprobs).exp()
        clipped = ratio.clamp(1 - self._loss.ratio_clip_min, 1 + self._loss.ratio_clip_max)
        return -torch.minimum(ratio * advantages, clipped * advantages)

    def update(self) -> None:
        """With the gradients that are there."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
