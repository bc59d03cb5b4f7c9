"""Log-probs of tokens that were sampled under a mask (structured outputs), as the policy has them without.

    logits ──▶ copied ──▶ mask of the grammar ──▶ sampled token ──▶ its log-prob in the copy

vLLM masks the logits before it samples, and its log-probs, raw ones too, are of what the mask left. The
trainer knows no mask: the log-probs that it compares are those of the whole distribution, and so are these.

Where the mask took most of what the policy would have sampled, the token is the grammar's and not the
policy's choice. It must not train: it is sampled however unlikely the policy finds it, so that its log-prob
would be pushed down without end. vLLM's rank of such a token is replaced by ``FORCED_RANK``.
"""

from __future__ import annotations

from typing import Any

import torch

# A token is the policy's own choice where the mask left at least this share of the probability. It is the
# lower end of the usual clip range: PPO takes no gradient of tokens that have become less likely than that.
_MIN_SHARE = 0.8
FORCED_RANK = 0  # vLLM counts ranks from 1


class UnmaskedLogprobsExtension:
    """A method that vLLM mixes into every worker."""

    # The worker's own, of vLLM.
    model_runner: Any

    def return_unmasked_logprobs(self) -> None:
        """From now on, return log-probs without the mask of structured outputs.

        Raises RuntimeError with a model runner of vLLM that samples in another way.
        """
        runner = self.model_runner
        if not all(hasattr(runner, name) for name in ("execute_model_state", "sample_tokens", "_sample")):
            raise RuntimeError(
                f"vLLM samples with {type(runner).__name__}, which does not show its logits before "
                "structured outputs mask them; set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        vars(self)["_unmasked_logprobs"] = _UnmaskedLogprobs(runner)


class _UnmaskedLogprobs:
    """Watches a model runner: copies the logits that a mask will change, and corrects what is sampled."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._sample_tokens, self._sample = runner.sample_tokens, runner._sample
        # Rows of the step under way that a mask will change, and their logits before that.
        self._unmasked: tuple[torch.Tensor, torch.Tensor] | None = None
        runner.sample_tokens, runner._sample = self._watched_step, self._corrected_sample

    def _watched_step(self, grammar_output: Any) -> Any:
        state = self._runner.execute_model_state
        if grammar_output is None or state is None or state.logits is None:
            return self._sample_tokens(grammar_output)
        places = self._runner.input_batch.req_id_to_index
        found = [places[name] for name in grammar_output.structured_output_request_ids if name in places]
        rows = torch.tensor(sorted(found), device=state.logits.device)
        self._unmasked = rows, state.logits[rows].float()
        try:
            return self._sample_tokens(grammar_output)
        finally:
            self._unmasked = None

    def _corrected_sample(self, logits: Any, spec_decode_metadata: Any) -> Any:
        output = self._sample(logits, spec_decode_metadata)
        found = output.logprobs_tensors
        if self._unmasked is None or found is None:
            return output
        rows, unmasked = self._unmasked
        temperature = self._runner.input_batch.sampling_metadata.temperature
        if temperature is not None:
            # A temperature of 0 stands for greedy sampling, whose log-probs nobody trains on.
            unmasked = unmasked / temperature[rows].clamp(min=1e-5)[:, None]
        sampled = found.logprob_token_ids[rows, :1].long()
        logprobs = unmasked.log_softmax(-1).gather(1, sampled)
        share = (logprobs - found.logprobs[rows, :1]).exp()[:, 0]
        ranks = found.selected_token_ranks[rows]
        found.selected_token_ranks[rows] = ranks.masked_fill(share < _MIN_SHARE, FORCED_RANK)
        found.logprobs[rows, :1] = logprobs
        return output
