"""What a run's engine is asked for a search: single responses, what its modules compute meanwhile, and its
weights. ``VllmEngine.look`` calls these functions by their paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from vllm import RequestOutput
from vllm.inputs import tokens_input

from nemo_like.generation.engine_requests import sampling_params
from nemo_like.generation.interface import GroupRequest
from nemo_like.generation.prefix_cache import drop_keys_and_values
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.generation.started_vllm import StartedVllm
from nemo_like.mismatch.engine_hooks import WorkerTrace, begin_trace, end_trace
from nemo_like.mismatch.held_weights import arrived_weights, held_weights
from nemo_like.mismatch.substitution import joined


@dataclass(frozen=True, slots=True)
class SampledAnswer:
    """A sampled response, and the log-prob of each of its tokens, nats, by the sampling settings."""

    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class EngineTrace:
    """What an engine computed for T tokens, and the log-probs of the T tokens that follow each of them."""

    token_ids: list[int]  # T + 1 of them
    points: dict[str, np.ndarray]  # [T, width] float32
    dtype: str
    logprobs: dict[str, np.ndarray]  # [T] by the sampling settings that are applied, "" for none
    logit_sizes: np.ndarray  # [T]
    sampled: np.ndarray  # log-probs that the engine reported of the last tokens, which it sampled


def sample(
    vllm: StartedVllm,
    prompt_ids: Sequence[int],
    sampling: SamplingSettings,
    seed: int,
    reads_cache: bool = False,
) -> SampledAnswer:
    """Sample one response; no other request may be under way. Unless ``reads_cache``, no cached prefix is
    read, so every token of the prompt is computed."""
    llm = vllm.llm
    if not reads_cache:
        drop_keys_and_values(llm, under_way=False)
    request = GroupRequest("sample", tuple(prompt_ids), (seed,))
    params = sampling_params(request, sampling, vllm.added_tokens)
    llm.add_request("sample", tokens_input(list(prompt_ids)), params, lora_request=vllm.weights.adapter)
    finished: list[RequestOutput] = []
    while not finished:
        finished = [one for one in llm.step() if one.finished]
    (completion,) = finished[0].outputs
    return SampledAnswer(list(completion.token_ids), list(completion.logprobs.logprobs))


def trace(vllm: StartedVllm, prompt_ids: Sequence[int], sampling: SamplingSettings, seed: int) -> EngineTrace:
    """Sample one response as ``sample`` does, and return what every module computed meanwhile. The modules
    must compute eagerly: nothing is recorded in compiled graphs."""
    llm = vllm.llm
    llm.collective_rpc(begin_trace)
    answer = sample(vllm, prompt_ids, sampling, seed)
    token_ids = [*prompt_ids, *answer.token_ids]
    workers: list[WorkerTrace] = llm.collective_rpc(end_trace, args=(token_ids, sampling))
    first = workers[0]
    assert first.logit_sizes is not None
    points = joined({rank: one.points for rank, one in enumerate(workers)}, divides_rows=False)
    sampled = np.array(answer.logprobs, np.float32)
    return EngineTrace(token_ids, points, first.dtype, first.logprobs, first.logit_sizes, sampled)


def held(vllm: StartedVllm) -> dict[str, int]:
    """Return a digest of each weight that the model computes with, by its Hugging Face name, as far as it can
    be read; empty for an engine of several workers."""
    found: dict[str, int] = vllm.llm.collective_rpc(held_weights)[0]
    return found


def arrived(vllm: StartedVllm) -> dict[str, int]:
    """Return a digest of the bytes of each tensor of the latest transfer, by its Hugging Face name; empty
    where the transfer computed none."""
    found: dict[str, int] = vllm.llm.collective_rpc(arrived_weights)[0]
    return found
