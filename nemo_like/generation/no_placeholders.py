"""Keeps an engine from sampling the tokens that stand for images and videos.

In a response such a token would stand for a picture that is not there, and the trainer could not read it. The
trainer leaves the same tokens out of its probabilities (``LogprobSettings.forbidden_ids``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor

from nemo_like.config.model_info import placeholder_ids


class NoPlaceholders(LogitsProcessor):
    """A logits processor of vLLM, for all requests alike; vLLM applies it before the temperature."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        ids = placeholder_ids(vllm_config.model_config.hf_config.to_dict())
        self._forbidden = torch.tensor(ids, dtype=torch.int64, device=device)

    def apply(self, logits: Tensor) -> Tensor:
        """Give the tokens a probability of 0. logits: [requests, vocabulary], changed in place."""
        return logits.index_fill_(1, self._forbidden, float("-inf"))

    def is_argmax_invariant(self) -> bool:
        """Return False: the most probable token may be one of them."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Do nothing, since all requests are alike."""
