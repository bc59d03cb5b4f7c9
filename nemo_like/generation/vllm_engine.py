"""``VllmEngine``: one in-process vLLM engine. One thread steps it and runs all calls, which it gets by a
queue.

a call of                  on the caller's thread         on the step thread (``engine_thread.py``)
  GenerationEngine           submit, abort, stats, ...      RequestLoop    also between calls: vLLM's steps
  JournalingEngine           open_journal, flush_journal
  WeightReceiver             pause, load_weights, ...       VllmWeights
  ScoringEngine              score, canary_logprobs         PromptScorer
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from vllm import EngineArgs

from nemo_like.cluster.imports import load_target
from nemo_like.cluster.runtime import use_temporary_directory_of_session
from nemo_like.cluster.stage import EngineHolds
from nemo_like.generation.engine_requests import QueuedRequest, sampling_params
from nemo_like.generation.engine_routes import EngineRoutes
from nemo_like.generation.engine_spec import EngineNode, EngineSpec
from nemo_like.generation.engine_thread import EngineThread
from nemo_like.generation.engine_weights import VllmWeights
from nemo_like.generation.interface import (
    EngineJournal,
    EngineOverdue,
    EngineStats,
    GenerationError,
    GroupRequest,
    PromptScores,
    ResultSink,
    WeightEndpoint,
    WeightGroup,
)
from nemo_like.generation.prompt_scores import PromptScorer
from nemo_like.generation.request_loop import RequestLoop
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.generation.started_vllm import build_llm_engine, complete_args, prepare_engine
from nemo_like.weight_transport.connections import Transfer


class VllmEngine:
    """A ``GenerationEngine``, ``JournalingEngine``, ``WeightReceiver`` and ``ScoringEngine``; these protocols
    describe the methods.

    It belongs in a serial actor whose process was started with ``engine_environment``.
    """

    def __init__(
        self,
        *,
        name: str,
        spec: EngineSpec,
        timeout_s: float,
        node: EngineNode | None = None,
    ) -> None:
        """Start the engine and wait until it is ready.

        ``node`` is the first node of an engine over several; on the others each has an ``EnginePart``.

        ``timeout_s`` is the deadline for the start, and for every later call. An engine with
        ``spec.weight_updates`` belongs in an asyncio actor that runs ``WAITING_METHODS`` in threads.

        Raises GenerationError when the engine does not start, ValueError when it should sleep but cannot.
        """
        use_temporary_directory_of_session()  # since vLLM leaves sockets and files behind
        self._name, self._spec, self._timeout_s = name, spec, timeout_s
        routes = EngineRoutes(spec.routed_experts, spec.device)
        args = complete_args(name, spec, routes, node)
        self._thread = EngineThread(name, timeout_s)
        self._thread.call(lambda: self._start(args, routes))

    def _start(self, args: EngineArgs, routes: EngineRoutes) -> None:
        # The step thread builds the engine, since each thread has its own current CUDA device.
        try:
            llm = build_llm_engine(self._spec, args)
        except Exception as error:
            self._thread.stop()
            raise GenerationError(f"engine {self._name!r} did not start: {error}") from error
        self._vllm = prepare_engine(self._name, self._spec, llm, routes)
        self._thread.needs_processes()
        self._requests = RequestLoop(self._vllm, self._timeout_s)
        self._weights = VllmWeights(self._vllm, self._requests, self._thread.fail)
        self._scorer = PromptScorer(self._vllm, self._requests, self._thread.fail)
        self._thread.work = self._requests

    # ------------------------------------------------------------------ generation

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingSettings, sink: ResultSink) -> None:
        queued = []
        for request in requests:
            params = sampling_params(request, sampling, self._vllm.added_tokens)
            self._vllm.routes.ask(request, params)
            queued.append(QueuedRequest(request, sampling, params, sink))
        self._thread.call(lambda: self._requests.add(queued))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._thread.call(lambda: self._requests.abort(request_ids))

    def abort_all(self) -> None:
        self._thread.call(self._requests.abort_all)

    def stats(self) -> EngineStats:
        return self._thread.call(self._requests.stats)

    def hold(self, what: EngineHolds) -> None:
        self._thread.call(lambda: self._weights.hold(what))

    def open_journal(self, journal: EngineJournal) -> None:
        self._thread.call(lambda: self._requests.open_journal(journal))

    def flush_journal(self) -> None:
        self._thread.call(self._requests.queue.flush)

    # ------------------------------------------------------------------ scores

    def canary_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        return self.score([token_ids], top_k=0).logprobs[1:].tolist()

    def score(self, sequences: Sequence[Sequence[int]], top_k: int) -> PromptScores:
        return self._thread.call(lambda: self._scorer.score(sequences, top_k))

    def look(self, function: str, *args: Any) -> Any:
        """Call a function, "package.module:name", with the engine's ``StartedVllm`` and ``args``, on the step
        thread and between its steps, and return its result."""
        target = load_target(function)
        return self._thread.call(lambda: target(self._vllm, *args))

    # ------------------------------------------------------------------ weights

    def weight_endpoint(self) -> WeightEndpoint:
        vllm = self._spec.generation.vllm_cfg
        is_on_one = vllm.num_nodes == 1 and ray.is_initialized()
        node_id = ray.get_runtime_context().get_node_id() if is_on_one else ""
        return WeightEndpoint(node_id=node_id, num_workers=vllm.num_workers)

    def join_weight_group(self, group: WeightGroup) -> None:
        self._thread.call(lambda: self._weights.join(group))

    def pause(self, version: int) -> None:
        granted = self._thread.call(lambda: self._weights.pause(version))
        try:
            granted.result(self._timeout_s)
        except TimeoutError:
            waits_for = self._thread.call(lambda: self._weights.withdraw_pause(granted))
            raise EngineOverdue(
                f"engine {self._name!r} did not pause for policy version {version} within "
                f"{self._timeout_s:g} s: {waits_for}",
                [self._name],
            ) from None

    def fetch_weights(self, transfer: Transfer, groups: Sequence[str]) -> None:
        self._thread.call(lambda: self._weights.fetch(transfer, groups))

    def load_weights(self, version: int, groups: Sequence[str]) -> int:
        return self._thread.call(lambda: self._weights.load(version, groups))

    def resume(self, transfer: Transfer) -> int:
        return self._thread.call(lambda: self._weights.resume(transfer))
