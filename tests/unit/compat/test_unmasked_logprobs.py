"""Log-probs without a grammar's mask, at the doors of vLLM's Model Runner V2, which runs on GPUs alone."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.logits_processor.loader import _load_v2_logitsprocs_by_fqcns

from nemo_like.compat.unmasked_logprobs import FORCED_RANK, UnmaskedLogprobsExtension
from nemo_like.generation.engine_args import _FOR_IMAGES
from nemo_like.generation.no_placeholders import NoPlaceholders

# Of two tokens the policy has probabilities 0.9 and 0.1, at temperature 1 and, the logits doubled, at 2.
LOGITS = torch.tensor([math.log(9.0), 0.0])
LOGPROBS = LOGITS.log_softmax(-1)


class Runner(GPUModelRunner):
    """Three requests, of which a grammar masks some; each samples the most likely token that is left."""

    def __init__(self, *, temperatures: list[float], num_speculative_steps: int = 0) -> None:
        self.num_speculative_steps = num_speculative_steps
        self.structured_outputs_worker: Any = SimpleNamespace(apply_grammar_bitmask=self.apply_mask)
        slots = torch.tensor(temperatures)
        self.sampler: Any = SimpleNamespace(
            sampling_states=SimpleNamespace(temperature=SimpleNamespace(gpu=slots))
        )

    def apply_mask(self, logits: torch.Tensor, batch: Any, masked_ids: list[str], forbidden: int) -> None:
        for name in masked_ids:
            logits[batch.req_ids.index(name), forbidden] = -torch.inf

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        logits = hidden_states.clone()
        if grammar_output is not None:
            self.structured_outputs_worker.apply_grammar_bitmask(logits, input_batch, *grammar_output)
        logits /= self.sampler.sampling_states.temperature.gpu[input_batch.idx_mapping, None]
        logprobs, sampled = logits.log_softmax(-1).max(-1, keepdim=True)
        found = SimpleNamespace(
            logprob_token_ids=sampled.int(),
            logprobs=logprobs,
            selected_token_ranks=torch.ones(len(logits), dtype=torch.int64),
        )
        return SimpleNamespace(logprobs_tensors=found), None, None


def watched(runner: Runner) -> Runner:
    extension = UnmaskedLogprobsExtension()
    extension.model_runner = runner
    extension.return_unmasked_logprobs()
    return runner


# Requests are in slots of the runner in another order than in the batch.
BATCH = SimpleNamespace(req_ids=["a", "b", "c"], idx_mapping=torch.tensor([2, 0, 1]))


def test_masked_rows_get_the_policys_logprobs_and_forced_tokens_a_rank_of_their_own() -> None:
    runner = watched(Runner(temperatures=[2.0, 1.0, 1.0]))
    logits = torch.stack([LOGITS, 2 * LOGITS, LOGITS])
    output, *_ = runner.sample(logits, BATCH, (["b", "a"], 0))
    found = output.logprobs_tensors
    assert found.logprob_token_ids[:, 0].tolist() == [1, 1, 0]
    torch.testing.assert_close(found.logprobs[:, 0], torch.stack([LOGPROBS[1], LOGPROBS[1], LOGPROBS[0]]))
    assert found.selected_token_ranks.tolist() == [FORCED_RANK, FORCED_RANK, 1]


def test_a_mask_that_leaves_most_of_the_probability_forces_nothing() -> None:
    runner = watched(Runner(temperatures=[1.0, 1.0, 1.0]))
    output, *_ = runner.sample(torch.stack([LOGITS] * 3), BATCH, (["c"], 1))
    found = output.logprobs_tensors
    torch.testing.assert_close(found.logprobs[:, 0], LOGPROBS[[0, 0, 0]])
    assert found.selected_token_ranks.tolist() == [1, 1, 1]


def test_steps_without_a_mask_are_left_as_they_are() -> None:
    runner = watched(Runner(temperatures=[1.0, 1.0, 1.0]))
    for grammar_output in (None, ([], 0)):
        output, *_ = runner.sample(torch.stack([LOGITS] * 3), BATCH, grammar_output)
        torch.testing.assert_close(output.logprobs_tensors.logprobs[:, 0], LOGPROBS[[0, 0, 0]])


def test_speculative_decoding_is_refused() -> None:
    first: Any = SimpleNamespace(num_spec_tokens=2, sample_tokens=None, _sample=None)
    for runner in (Runner(temperatures=[], num_speculative_steps=2), first):
        with pytest.raises(RuntimeError, match="speculative decoding has several; leave it off"):
            watched(runner)


def test_both_model_runners_load_what_keeps_placeholders_from_being_sampled() -> None:
    (loaded,) = _load_v2_logitsprocs_by_fqcns(_FOR_IMAGES["logits_processors"])
    assert loaded is NoPlaceholders
    config = {"image_token_id": 1, "video_token_id": 2}
    vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=SimpleNamespace(to_dict=lambda: config))
    )
    cpu = torch.device("cpu")
    for given in ((cpu, False), (SimpleNamespace(device=cpu),)):
        logits = NoPlaceholders(vllm_config, *given).apply(torch.zeros(2, 4))
        assert logits.isneginf().nonzero()[:, 1].unique().tolist() == [1, 2]
