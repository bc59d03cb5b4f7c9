"""``PromptScorer``: lets an idle vLLM engine compute the log-probs of given tokens, as packed columns.

vLLM computes them at temperature 1 and without top-p, top-k or min-p, whatever the request's sampling
settings are. For each token but the first it returns the token's own log-prob, followed by the most likely
tokens at that position. It reads no cached prefix for such a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from vllm import RequestOutput, SamplingParams
from vllm.inputs import tokens_input
from vllm.logprobs import FlatLogprobs
from vllm.sampling_params import RequestOutputKind

from nemo_like.generation.interface import GenerationError, PromptScores
from nemo_like.generation.request_loop import RequestLoop
from nemo_like.generation.started_vllm import StartedVllm


def scoring_params(top_k: int) -> SamplingParams:
    """Return the parameters of a request that scores its prompt and asks for ``top_k`` most likely tokens."""
    return SamplingParams(
        max_tokens=1,  # vLLM has no request without a response
        temperature=0.0,
        prompt_logprobs=top_k,
        flat_logprobs=True,
        detokenize=False,
        ignore_eos=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def packed_scores(lengths: Sequence[int], outputs: Sequence[RequestOutput], top_k: int) -> PromptScores:
    """Collect the scores of sequences of these lengths from the finished requests, in the same order."""
    scores = PromptScores(
        np.zeros(sum(lengths), np.float32),
        np.zeros((sum(lengths), top_k), np.int32),
        np.zeros((sum(lengths), top_k), np.float32),
    )
    start = 0
    for length, output in zip(lengths, outputs, strict=True):
        if length > 1:
            flat = cast(FlatLogprobs, output.prompt_logprobs)
            after_first = slice(start + 1, start + length)
            logprobs = np.asarray(flat.logprobs, np.float32).reshape(length - 1, top_k + 1)
            ids = np.asarray(flat.token_ids, np.int32).reshape(length - 1, top_k + 1)
            scores.logprobs[after_first] = logprobs[:, 0]
            scores.topk_ids[after_first], scores.topk_logprobs[after_first] = ids[:, 1:], logprobs[:, 1:]
        start += length
    return scores


class PromptScorer:
    """Scores tokens by one ``VllmEngine``. Only the engine's step thread calls it."""

    def __init__(
        self, started: StartedVllm, requests: RequestLoop, fail: Callable[[Exception], GenerationError]
    ) -> None:
        """Score by this engine; ``fail`` is ``EngineThread.fail``."""
        self._vllm, self._requests, self._fail = started, requests, fail

    def score(self, sequences: Sequence[Sequence[int]], top_k: int) -> PromptScores:
        """Score the sequences, as ``ScoringEngine.score`` says."""
        if self._requests.num_groups:
            raise RuntimeError(f"engine {self._vllm.name!r} still generates, so it cannot score tokens")
        self._vllm.check_awake()
        llm, adapter = self._vllm.llm, self._vllm.weights.adapter
        names = [f"score-{index}" for index in range(len(sequences))]
        engine_ids: list[str] = []
        try:
            for name, token_ids in zip(names, sequences, strict=True):
                prompt, params = tokens_input(list(token_ids)), scoring_params(top_k)
                engine_ids.append(llm.add_request(name, prompt, params, lora_request=adapter))
        except Exception:
            llm.abort_request(names[: len(engine_ids)])
            raise
        finished: dict[str, RequestOutput] = {}
        try:
            while len(finished) < len(names):
                finished |= {one.request_id: one for one in llm.step() if one.finished}
        except Exception as error:
            self._fail(error)
            raise
        self._vllm.routes.forget(engine_ids)
        return packed_scores([len(one) for one in sequences], [finished[name] for name in names], top_k)
