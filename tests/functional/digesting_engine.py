"""An engine that says what its model holds."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from nemo_like.generation.vllm_engine import VllmEngine


class DigestingEngine(VllmEngine):
    """To be hosted in the place of ``VllmEngine``."""

    def model_digest(self) -> str:
        """The digest of every parameter and buffer of every worker's model."""
        digests = self._thread.call(lambda: self._vllm.llm.collective_rpc(_model_digest))
        return " ".join(digests)


def _model_digest(worker: Any) -> str:
    digest = hashlib.blake2b()
    model = worker.get_model()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if not tensor.is_mkldnn:
            digest.update(name.encode())
            digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
