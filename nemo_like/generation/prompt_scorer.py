"""``PromptScorer``: lets an idle engine compute the log-probs of given tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm import RequestOutput
from vllm.inputs import tokens_input

from nemo_like.generation.interface import GenerationError
from nemo_like.generation.prompt_scores import PromptScores, packed_scores, scoring_params
from nemo_like.generation.request_loop import RequestLoop
from nemo_like.generation.started_vllm import StartedVllm


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
