"""What is recorded of an engine's modules, and of which models nothing is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nemo_like.mismatch.engine_hooks import begin_trace


class TransformersForCausalLM(torch.nn.Module):
    """As vLLM's Transformers backend names its models."""


def test_modules_of_vllms_transformers_backend_are_refused() -> None:
    worker = SimpleNamespace(get_model=TransformersForCausalLM)
    with pytest.raises(ValueError, match=r"Transformers backend \(TransformersForCausalLM\), whose modules"):
        begin_trace(worker)
