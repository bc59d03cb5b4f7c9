"""Computes the log-probs that tokens sampled under a mask (structured outputs) have without the mask.

    logits ──▶ copied ──▶ mask of the grammar ──▶ sampled token ──▶ its log-prob in the copy

vLLM masks the logits before it samples, and computes all log-probs, raw ones too, from the masked logits. The
trainer knows no mask: it compares log-probs under the whole distribution, which this module computes.

Where the mask took most of the policy's probability, the grammar chose the token and not the policy. Such a
token must not train: it is sampled however unlikely the policy finds it, so that training would push its
log-prob down without end. vLLM's rank of the token is replaced by ``FORCED_RANK``.

vLLM has two model runners: the first samples on CPUs, the second (V2) wherever there is Triton. In each, the
method that masks and the method that samples are wrapped.

Private parts: both model runners of vllm 0.32.0. vLLM has no option for log-probs without the mask. This
module can go with a vLLM that has one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondRunner

# A token is the policy's own choice where the mask left at least this share of the probability. It is the
# lower end of the usual clip range: PPO takes no gradient of tokens whose ratio is below it.
_MIN_SHARE = 0.8
FORCED_RANK = 0  # vLLM counts ranks from 1


class UnmaskedLogprobsExtension:
    """A method that vLLM mixes into every worker."""

    # vLLM's worker has this.
    model_runner: Any

    def return_unmasked_logprobs(self) -> None:
        """Let this worker return log-probs without the mask of structured outputs.

        Raises RuntimeError where vLLM samples in a way that does not show its logits before they are masked.
        """
        is_second = isinstance(self.model_runner, SecondRunner)
        runner = self.model_runner
        if runner.num_speculative_steps if is_second else runner.num_spec_tokens:
            raise RuntimeError(
                "log-probs without the mask of structured outputs need one row of logits for each request, "
                "and speculative decoding has several; leave it off where there are agents"
            )
        watch = _SecondRunnerWatch if is_second else _FirstRunnerWatch
        vars(self)["_unmasked_logprobs"] = watch(runner)


class _Unmasked:
    """Unmasked logits of the rows that a mask will change in the step under way."""

    def __init__(self, rows: Sequence[int], logits: Tensor) -> None:
        """Copy the rows of the batch's logits, [rows of the batch, vocabulary]."""
        self.rows = torch.tensor(rows, dtype=torch.int64, device=logits.device)
        self._logits = logits[self.rows].float()

    def correct(self, found: Any, temperatures: Tensor | None) -> None:
        """Write the log-probs without the mask, and the rank of forced tokens, into ``found``.

        found: vLLM's LogprobsTensors of the whole batch; temperatures: [masked], None where all are 1.
        """
        logits = self._logits
        if temperatures is not None:
            # A temperature of 0 stands for greedy sampling, whose log-probs nobody trains on.
            logits = logits / temperatures.clamp(min=1e-5)[:, None]
        sampled = found.logprob_token_ids[self.rows, :1].long()
        logprobs = logits.log_softmax(-1).gather(1, sampled)
        share = (logprobs - found.logprobs[self.rows, :1]).exp()[:, 0]
        ranks = found.selected_token_ranks[self.rows]
        found.selected_token_ranks[self.rows] = ranks.masked_fill(share < _MIN_SHARE, FORCED_RANK)
        found.logprobs[self.rows, :1] = logprobs


class _FirstRunnerWatch:
    """Wraps the masking and the sampling of vLLM's first model runner."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sample_tokens, self._sample = runner.sample_tokens, runner._sample
        self._unmasked: _Unmasked | None = None
        runner.sample_tokens, runner._sample = self._watched_step, self._corrected_sample

    def _watched_step(self, grammar_output: Any) -> Any:
        state = self._runner.execute_model_state
        if grammar_output is None or state is None or state.logits is None:
            return self._sample_tokens(grammar_output)
        row_of = self._runner.input_batch.req_id_to_index
        rows = [row_of[name] for name in grammar_output.structured_output_request_ids if name in row_of]
        self._unmasked = _Unmasked(sorted(rows), state.logits)
        try:
            return self._sample_tokens(grammar_output)
        finally:
            self._unmasked = None

    def _corrected_sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        output = self._sample(logits, spec_decode_metadata)
        if self._unmasked is not None and output.logprobs_tensors is not None:
            temperature = self._runner.input_batch.sampling_metadata.temperature
            of_rows = None if temperature is None else temperature[self._unmasked.rows]
            self._unmasked.correct(output.logprobs_tensors, of_rows)
        return output


class _SecondRunnerWatch:
    """Wraps the masking and the sampling of vLLM's Model Runner V2."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._unmasked: _Unmasked | None = None
        masks = runner.structured_outputs_worker
        self._mask, self._sample = masks.apply_grammar_bitmask, runner.sample
        masks.apply_grammar_bitmask, runner.sample = self._watched_mask, self._corrected_sample

    def _watched_mask(self, logits: Tensor, batch: Any, masked_ids: list[str], bitmask: Any) -> None:
        wanted = set(masked_ids)
        rows = [row for row, name in enumerate(batch.req_ids) if name in wanted]
        self._unmasked = _Unmasked(rows, logits)
        self._mask(logits, batch, masked_ids, bitmask)

    def _corrected_sample(self, hidden_states: Any, batch: Any, grammar_output: Any) -> Any:
        try:
            results = self._sample(hidden_states, batch, grammar_output)
            unmasked, found = self._unmasked, results[0].logprobs_tensors
        finally:
            self._unmasked = None
        if unmasked is not None and found is not None:
            temperatures = self._runner.sampler.sampling_states.temperature.gpu
            unmasked.correct(found, temperatures[batch.idx_mapping[unmasked.rows]])
        return results
