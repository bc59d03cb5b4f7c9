"""Keeps an engine from sampling the tokens that stand for images and videos.

In a response such a token would stand for a picture that does not exist, and the trainer could not read it.
The trainer leaves the same tokens out of its probabilities (``LogprobSettings.forbidden_ids``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor import LogitsProcessor as ForFirstRunner
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ForSecondRunner

from nemo_like.models.model_info import placeholder_ids


class NoPlaceholders(ForFirstRunner, ForSecondRunner):
    """A logits processor for both of vLLM's model runners. It treats all requests alike; vLLM applies it
    before the temperature."""

    def __init__(self, vllm_config: Any, where: Any, is_pin_memory: bool = False) -> None:
        """Take the device from ``where``: the first runner passes it, the second its state of requests."""
        device = where if isinstance(where, torch.device) else where.device
        ids = placeholder_ids(vllm_config.model_config.hf_config.to_dict())
        self._forbidden = torch.tensor(ids, dtype=torch.int64, device=device)

    def apply(self, logits: Tensor, context: Any = None) -> Tensor:
        """Give the placeholder tokens a probability of 0. logits: [rows, vocabulary], changed in place."""
        return logits.index_fill_(1, self._forbidden, float("-inf"))

    def is_argmax_invariant(self) -> bool:
        """Return False: the most probable token may be a placeholder."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Do nothing, since all requests are alike."""
