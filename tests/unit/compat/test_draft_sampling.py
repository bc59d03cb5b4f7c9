"""What vLLM's CPU build gets wrong where it drafts, and what takes its place."""

from __future__ import annotations

import pytest
import torch
from vllm.v1.sample import rejection_sampler

from nemo_like.compat.draft_sampling import DraftSamplingExtension, expand_batch_to_tokens


def test_every_token_of_a_draft_gets_the_value_of_its_request() -> None:
    values, counts = torch.tensor([0.5, 0.0, 2.0]), torch.tensor([2, 5, 6], dtype=torch.int32)
    expanded = expand_batch_to_tokens(values, counts, 6, replace_from=0, replace_to=1)
    assert expanded.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0, 2.0]
    assert expanded.dtype == values.dtype
    assert values.tolist() == [0.5, 0.0, 2.0]
    top_k = torch.tensor([3, 7], dtype=torch.int32)
    # A request without a draft has no token.
    assert expand_batch_to_tokens(top_k, torch.tensor([0, 2], dtype=torch.int32), 2).tolist() == [7, 7]


def test_it_takes_the_place_of_the_function_that_vllm_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", rejection_sampler.expand_batch_to_tokens)
    DraftSamplingExtension().mend_draft_sampling()
    called = rejection_sampler.apply_sampling_constraints.__globals__["expand_batch_to_tokens"]
    assert called is expand_batch_to_tokens
