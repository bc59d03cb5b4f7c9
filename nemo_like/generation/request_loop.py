"""``RequestLoop``: gives an engine's requests to vLLM, steps it, and delivers finished groups.

    add, abort ──▶ waiting ──▶ vLLM: a step, again and again
                                  │ groups that finished in this step
                                  └─▶ sink.submit("on_groups", results)

An engine with ``weight_updates`` holds back the requests that vLLM has no room for, and asks ``engine_order``
before each step what comes next. It can write what it does to a journal, which another engine can replay.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import vllm
from vllm import RequestOutput

from nemo_like.generation.engine_journal import (
    JournalWriter,
    journal_settings,
    read_journal,
)
from nemo_like.generation.engine_order import (
    AbortRequests,
    AddRequests,
    GrantPause,
    JournalOrder,
    LiveOrder,
    RunStep,
    WaitFor,
)
from nemo_like.generation.engine_queue import EngineQueue
from nemo_like.generation.engine_requests import (
    QueuedRequest,
    as_prompt,
    as_response,
    check_places,
    version_spans,
)
from nemo_like.generation.engine_routes import NO_ROUTES
from nemo_like.generation.engine_tally import EngineActivity, EngineTally
from nemo_like.generation.interface import (
    EngineJournal,
    EngineStats,
    GenerationError,
    GroupResult,
    ResultSink,
)
from nemo_like.generation.started_vllm import StartedVllm
from nemo_like.observability.trace import span


class RequestLoop:
    """The ``EngineWork`` of a ``VllmEngine``. Only the engine's step thread calls it."""

    def __init__(self, started: StartedVllm, timeout_s: float) -> None:
        """Serve the started engine; ``timeout_s`` bounds the wait for a call that a replayed journal
        expects."""
        self._vllm, self._timeout_s = started, timeout_s
        self.unfinished: dict[str, QueuedRequest] = {}  # the requests that vLLM has
        live = LiveOrder(started.spec.weight_updates, started.spec.generation.vllm_cfg.max_num_seqs)
        self.queue: EngineQueue[QueuedRequest] = EngineQueue(live, timeout_s)
        self._tally = EngineTally()

    @property
    def num_groups(self) -> int:
        """The number of unfinished groups, in vLLM or waiting."""
        return len(self.unfinished) + len(self.queue.waiting)

    # Calls from outside

    def add(self, queued: Sequence[QueuedRequest]) -> None:
        """Take requests, as ``GenerationEngine.submit`` says."""
        self._vllm.check_awake()
        unfinished = {*self.unfinished, *self.queue.waiting}
        for one in queued:
            if one.request.request_id in unfinished:
                raise ValueError(f"request {one.request.request_id!r} is unfinished already; use another id")
            unfinished.add(one.request.request_id)
        if self._vllm.spec.weight_updates is not None:
            self._enqueue(queued)
            return
        weights = self._vllm.weights
        if self._vllm.spec.adapter is not None and weights.adapter is None and weights.paused_for is not None:
            raise RuntimeError(
                f"engine {self._vllm.name!r} waits for its first adapters; a request that came now would be "
                "sampled without them; submit it after the weight update"
            )
        added: list[str] = []
        try:
            for one in queued:
                self._begin(one)
                added.append(one.request.request_id)
        except Exception:
            self._drop(added)
            raise

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests, as ``GenerationEngine.abort`` says."""
        self._drop(self.queue.abort(request_ids, self.unfinished.keys()))

    def abort_all(self) -> None:
        """Abort every request, as ``GenerationEngine.abort_all`` says."""
        self._drop(self.queue.abort_all(self.unfinished.keys()))

    def stats(self) -> EngineStats:
        """Return the totals since the engine started."""
        return self._tally.stats(self._vllm.weights.policy_version)

    def open_journal(self, journal: EngineJournal) -> None:
        """Begin a journal, as ``JournalingEngine.open_journal`` says."""
        name, spec = self._vllm.name, self._vllm.spec
        if spec.weight_updates is None:
            raise ValueError(
                f"engine {name!r}: a journal needs weight_updates, without which there is no order to "
                "write down; open none"
            )
        if self.num_groups:
            raise RuntimeError(
                f"engine {name!r} still generates {self.num_groups} groups, so no journal can begin"
            )
        settings = journal_settings(
            vllm.__version__,
            spec.generation,
            spec.weight_updates,
            {
                "device": spec.device.value,
                "precision": spec.precision.value,
                "seed": spec.seed,
                "max_total_sequence_length": spec.max_total_sequence_length,
            },
        )
        order = None
        if journal.replayed is not None:
            replayed = read_journal(Path(journal.replayed))
            replayed.check_settings(settings)
            order = JournalOrder(replayed)
        writer = JournalWriter(Path(journal.path), name, settings)
        self.queue.flush()
        self.queue = EngineQueue(self.queue.live, self._timeout_s, order, writer)

    # The ``EngineWork`` of the step thread

    def patience_s(self) -> float | None:
        return self.queue.patience_s()

    def advance(self) -> bool:
        weights, clock = self._vllm.weights, self._tally.clock
        is_paused = weights.paused_for is not None
        num_sequences = self._vllm.llm.get_num_unfinished_requests()
        action = self.queue.next(self.unfinished.keys(), num_sequences, is_paused=is_paused)
        match action:
            case AddRequests():
                for name in action.request_ids:
                    self._begin(self.queue.take(name))
            case AbortRequests():
                self._drop(action.request_ids)
            case GrantPause():
                weights.paused_for = self.queue.grant_pause()
                clock.enter(EngineActivity.paused)
            case RunStep():
                clock.enter(EngineActivity.decoding)
                self._step()
            case WaitFor():
                clock.enter(EngineActivity.paused if is_paused else EngineActivity.idle)
                return False
        return True

    def fail(self, error: GenerationError, reason: str) -> None:
        waiting = self.queue.fail(error)
        sinks = {id(entry.sink): entry.sink for entry in (*self.unfinished.values(), *waiting)}
        self.unfinished.clear()
        for sink in sinks.values():
            sink.submit("on_engine_error", self._vllm.name, reason)
        try:
            self.queue.flush()
        except Exception:
            traceback.print_exc()  # into the log, since callers hear of the first failure

    def _step(self) -> None:
        started_s = time.monotonic()
        with span("generate"):
            outputs = self._vllm.llm.step()
        self.queue.num_steps += 1
        self._deliver([output for output in outputs if output.finished])
        taken_s = time.monotonic() - started_s
        self._tally.generation_s += taken_s
        if self.queue.is_draining:
            self._tally.draining_s += taken_s

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Call each sink once, with all of its groups that finished in this step."""
        by_sink: dict[int, tuple[ResultSink, list[GroupResult]]] = {}
        weights = self._vllm.weights
        for output in outputs:
            check_places(self.unfinished[output.request_id].request, output)
        routes = self._vllm.routes.take([(self.unfinished[one.request_id].request, one) for one in outputs])
        for output in outputs:
            entry = self.unfinished.pop(output.request_id)
            responses = tuple(
                as_response(
                    completion,
                    routes.get((output.request_id, completion.index), NO_ROUTES),
                    with_versions=self._vllm.spec.weight_updates is not None,
                    is_masked=entry.is_masked,
                )
                for completion in output.outputs
            )
            result = GroupResult(output.request_id, responses, weights.policy_version, weights.digest)
            self.queue.write_finished(result.request_id, [version_spans(one) for one in output.outputs])
            if self.queue.is_wanted(output.request_id):
                self._tally.count(result)
                for completion in output.outputs:
                    self._tally.count_drafts(completion.spec_decode_metrics)
                by_sink.setdefault(id(entry.sink), (entry.sink, []))[1].append(result)
        for sink, results in by_sink.values():
            sink.submit("on_groups", results)

    def _enqueue(self, queued: Sequence[QueuedRequest]) -> None:
        """Let the requests wait for their turn. Check their lengths now, since vLLM sees them only then."""
        longest = self._vllm.spec.max_total_sequence_length
        for one in queued:
            num_tokens = len(one.request.prompt_ids)
            if num_tokens >= longest:
                raise ValueError(
                    f"request {one.request.request_id!r} has {num_tokens} tokens, which leaves no room for a "
                    f"response in {longest}; use shorter prompts or raise policy.max_total_sequence_length"
                )
        self.queue.waiting.update({one.request.request_id: one for one in queued})

    def _begin(self, queued: QueuedRequest) -> None:
        """Give a request to vLLM."""
        llm, weights = self._vllm.llm, self._vllm.weights
        request, prompt = queued.request, as_prompt(queued.request, llm.model_config.hf_config)
        if self._vllm.keeps_kv_cache:
            # Keys and values of old weights stay in the cache for samples under way, and for no other
            # samples.
            prompt["cache_salt"] = str(weights.num_loads)
        engine_id = llm.add_request(request.request_id, prompt, queued.params, lora_request=weights.adapter)
        self._vllm.routes.add(request, engine_id)
        self.unfinished[request.request_id] = queued

    def _drop(self, request_ids: Sequence[str]) -> None:
        """Let vLLM abort the requests that it has, and forget them; ignore all other ids."""
        known = {name: queued for name in request_ids if (queued := self.unfinished.pop(name, None))}
        self._vllm.llm.abort_request(list(known))
        for name, queued in known.items():
            self._vllm.routes.drop(name, queued.num_responses)
