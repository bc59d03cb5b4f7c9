"""``TracedEngine``: the engine of a run, which also samples single responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm import RequestOutput
from vllm.inputs import tokens_input

from nemo_like.generation.engine_requests import sampling_params
from nemo_like.generation.interface import GroupRequest
from nemo_like.generation.prefix_cache import drop_keys_and_values
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.generation.vllm_engine import VllmEngine


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A sampled response, and the log-prob of each of its tokens, nats, by the sampling settings."""

    token_ids: list[int]
    logprobs: list[float]


class TracedEngine(VllmEngine):
    """A ``VllmEngine`` that looks at one request at a time."""

    def sample(self, prompt_ids: Sequence[int], sampling: SamplingSettings, seed: int) -> SampledAnswer:
        """Sample one response. No cached prefix is read, so every token of the prompt is computed."""
        return self._thread.call(lambda: self._sampled(prompt_ids, sampling, seed))

    def _sampled(self, prompt_ids: Sequence[int], sampling: SamplingSettings, seed: int) -> SampledAnswer:
        llm = self._vllm.llm
        drop_keys_and_values(llm, under_way=False)
        request = GroupRequest("sample", tuple(prompt_ids), (seed,))
        params = sampling_params(request, sampling, self._vllm.added_tokens)
        llm.add_request(
            "sample", tokens_input(list(prompt_ids)), params, lora_request=self._vllm.weights.adapter
        )
        finished: list[RequestOutput] = []
        while not finished:
            finished = [one for one in llm.step() if one.finished]
        (completion,) = finished[0].outputs
        return SampledAnswer(list(completion.token_ids), list(completion.logprobs.logprobs))
