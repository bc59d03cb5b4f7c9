"""``VllmEngine``: one in-process vLLM engine. One thread steps it, and runs all calls, which come by a queue.

    caller's thread                     step thread
      submit, abort, pause,   ──queue──▶  run commands, then engine.step(), again and again
      load_weights, stats                      │ groups that finished in this step
                                               └─▶ sink.submit("on_groups", results)

With nothing to decode the step thread blocks on the queue. It also receives weights, so no step runs with
half of them.

An engine that takes weights while samples are under way keeps the requests that vLLM has not begun, and asks
``engine_order`` before each step what comes next. What it does is written to a journal, from which another
engine can do the same again.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import queue
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import ray
import vllm
from vllm import LLMEngine, RequestOutput
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.batch.tags import AS_LOADED
from nemo_like.cluster.breakdown import break_down, in_short, is_out_of_memory, is_own
from nemo_like.cluster.gloo import one_gloo_device
from nemo_like.cluster.runtime import use_temporary_directory_of_session
from nemo_like.cluster.stage import EngineHolds
from nemo_like.data.images import decoded
from nemo_like.generation.engine_args import engine_args
from nemo_like.generation.engine_journal import (
    EngineJournal,
    JournalWriter,
    journal_settings,
    read_journal,
)
from nemo_like.generation.engine_order import (
    AbortRequests,
    Action,
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
    as_response,
    check_places,
    sampling_params,
    version_spans,
)
from nemo_like.generation.engine_routes import NO_ROUTES, EngineRoutes
from nemo_like.generation.engine_spec import EngineSpec
from nemo_like.generation.engine_tally import EngineActivity, EngineTally
from nemo_like.generation.interface import (
    EngineOverdue,
    EngineStats,
    GenerationError,
    GroupRequest,
    GroupResult,
    ResultSink,
    WeightEndpoint,
    WeightGroup,
)
from nemo_like.generation.options import KvCacheAfterUpdate
from nemo_like.generation.prefix_cache import drop_keys_and_values
from nemo_like.generation.prompt_scores import PromptScores, packed_scores, scoring_params
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.generation.shared_names import remove_names, track_names
from nemo_like.generation.sleep import EngineMemory, has_sleep_mode
from nemo_like.generation.speculation import speculation
from nemo_like.generation.without_torchvision import is_needed, patch_vllm
from nemo_like.generation.worker_calls import call_workers
from nemo_like.models.model_info import has_vision_tower
from nemo_like.observability.trace import span
from nemo_like.policy.options import Device
from nemo_like.weight_transport.connections import Transfer

_T = TypeVar("_T")

# After so many net allocations Python collects the youngest generation.
_GC_THRESHOLD = 50_000
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[], Any]
    done: Future[Any]


class VllmEngine:
    """A ``GenerationEngine`` and ``WeightReceiver``, where the methods are described.

    It belongs in a serial actor whose process was started with ``engine_environment``.
    """

    def __init__(
        self,
        *,
        name: str,
        spec: EngineSpec,
        timeout_s: float,
    ) -> None:
        """Start the engine and wait until it is ready.

        ``timeout_s`` is the deadline for the start, and for every later call. An engine with
        ``spec.weight_updates`` belongs in an asyncio actor that runs ``WAITING_METHODS`` in threads.

        Raises GenerationError when the engine does not start, ValueError when it should sleep but cannot.
        """
        use_temporary_directory_of_session()  # since vLLM leaves sockets and files behind
        self._name, self._spec, self._timeout_s = name, spec, timeout_s
        self._num_workers = spec.generation.vllm_cfg.tensor_parallel_size
        self._routes = EngineRoutes(spec.routed_experts, spec.device)
        self._reads_images = has_vision_tower(spec.model_name)
        self._engine_args = engine_args(spec)
        self._complete_args(spec.model_name if self._reads_images else spec.tokenizer_name)
        self._engine: LLMEngine
        self._failure: str | None = None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._unfinished: dict[str, QueuedRequest] = {}  # those that vLLM has
        live = LiveOrder(spec.weight_updates, spec.generation.vllm_cfg.max_num_seqs)
        self._queue: EngineQueue[QueuedRequest] = EngineQueue(live, timeout_s)
        self._policy_version = AS_LOADED
        # What each request needs to be computed with the adapter; None where there is none.
        self._adapter: LoRARequest | None = None
        self._weights_digest: int | None = None
        self._paused_for: int | None = None
        self._tally, self._num_loads = EngineTally(), 0
        self._num_processes = 0  # of the engine's workers, this process not counted
        self._did_not_start = False
        self._thread = threading.Thread(target=self._serve, name=f"{name}-step", daemon=True)
        self._thread.start()
        self._call(self._start_engine)

    def _complete_args(self, tokenizer_name: str | None) -> None:
        """Set the arguments on which parts of this engine depend. To process images it needs a tokenizer."""
        if self._num_workers > 1:
            track_names()
        self._routes.configure(self._engine_args)
        self._engine_args.enable_sleep_mode = has_sleep_mode(self._name, self._spec.sleeps, self._spec.device)
        # CUDA graphs, where there are any, leave the GPU too.
        self._engine_args.sleep_mode_offload_cudagraph = self._engine_args.enable_sleep_mode
        if self._spec.weight_updates is not None:
            # A step that is computed ahead would belong to two versions, and depend on the machine's speed.
            self._engine_args.async_scheduling = False
        if self._spec.structured_outputs:
            # Without spaces of choice: a policy that is bad at JSON would fill its response with them.
            self._engine_args.structured_outputs_config.disable_any_whitespace = True
            self._engine_args.structured_outputs_config.backend = "xgrammar"
        if tokenizer_name is not None:
            self._engine_args.tokenizer = tokenizer_name
            self._engine_args.skip_tokenizer_init = False

    # ------------------------------------------------------------------ generation

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingSettings, sink: ResultSink) -> None:
        """Queue the requests; the sink gets each group's result after the engine step that finishes it.

        Raises ValueError when a request cannot be served; then none of this call's requests is queued.
        """
        queued = []
        for request in requests:
            params = sampling_params(request, sampling, self._added_tokens)
            self._routes.ask(request, params)
            queued.append(QueuedRequest(request, sampling, params, sink))
        self._call(lambda: self._add(queued))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._call(lambda: self._abort(request_ids))

    def abort_all(self) -> None:
        self._call(lambda: self._drop(self._queue.abort_all(self._unfinished.keys())))

    def stats(self) -> EngineStats:
        return self._call(lambda: self._tally.stats(self._policy_version))

    def open_journal(self, journal: EngineJournal) -> None:
        """Write a journal from now on, in place of an earlier one, and repeat the events of another first.

        Its steps count from here. Raises RuntimeError while requests are unfinished, ValueError without
        ``weight_updates``, JournalError when the journal to repeat cannot be read or is of an engine with
        other settings, and DiskFull or OSError.
        """
        self._call(lambda: self._open_journal(journal))

    def flush_journal(self) -> None:
        """Bring what the journal has so far to its file. Raises DiskFull or OSError."""
        self._call(self._queue.flush)

    def hold(self, what: EngineHolds) -> None:
        self._call(lambda: self._hold(what))

    def canary_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probs of all tokens but the first, at temperature 1, nats.

        Raises RuntimeError while requests are unfinished.
        """
        return self.score([token_ids], top_k=0).logprobs[1:].tolist()

    def score(self, sequences: Sequence[Sequence[int]], top_k: int) -> PromptScores:
        """Return the log-probs of all tokens of the sequences, at temperature 1, and the ``top_k`` tokens
        that are most likely in their places.

        A sequence has at least one token, and fewer than the engine's longest. Raises ValueError for another,
        RuntimeError while requests are unfinished.
        """
        return self._call(lambda: self._score(sequences, top_k))

    # ------------------------------------------------------------------ weights

    def weight_endpoint(self) -> WeightEndpoint:
        node_id = ray.get_runtime_context().get_node_id() if ray.is_initialized() else ""
        return WeightEndpoint(node_id=node_id, num_workers=self._num_workers)

    def join_weight_group(self, group: WeightGroup) -> None:
        self._call(lambda: self._rpc("join_weight_group", group=group))

    def pause(self, version: int) -> None:
        granted = self._call(lambda: self._pause(version))
        try:
            granted.result(self._timeout_s)
        except TimeoutError:
            waits_for = self._call(lambda: self._withdraw_pause(granted))
            raise EngineOverdue(
                f"engine {self._name!r} did not pause for policy version {version} within "
                f"{self._timeout_s:g} s: {waits_for}",
                [self._name],
            ) from None

    def fetch_weights(self, transfer: Transfer, groups: Sequence[str]) -> None:
        self._call(lambda: self._fetch_weights(transfer, groups))

    def load_weights(self, version: int, groups: Sequence[str]) -> int:
        return self._call(lambda: self._load_weights(version, groups))

    def resume(self, transfer: Transfer) -> int:
        return self._call(lambda: self._resume(transfer))

    # ------------------------------------------------------------------ the step thread

    def _call(self, function: Callable[[], _T]) -> _T:
        """Run ``function`` on the step thread and return its result.

        Raises what it raises, GenerationError once the engine has failed, and EngineOverdue when the step
        thread does not answer in time.
        """
        done: Future[_T] = Future()
        self._commands.put(_Command(function, done))
        try:
            return done.result(self._timeout_s)
        except TimeoutError:
            message = f"engine {self._name!r} did not answer within {self._timeout_s:g} s"
            raise EngineOverdue(message, [self._name]) from None

    def _serve(self) -> None:
        action: Action = WaitFor()
        while not self._did_not_start:
            self._run_commands(action)
            action = self._advance()

    def _run_commands(self, latest: Action) -> None:
        """Run all queued commands; when the latest action is to wait, wait for one first."""
        try:
            command = self._commands.get(block=isinstance(latest, WaitFor), timeout=self._queue.patience_s())
            while True:
                self._run(command)
                command = self._commands.get(block=False)
        except queue.Empty:
            pass

    def _advance(self) -> Action:
        """Do what comes next, and return what that was."""
        if self._failure is not None or self._did_not_start:
            return WaitFor()
        is_paused = self._paused_for is not None
        try:
            num_sequences = self._engine.get_num_unfinished_requests()
            action = self._queue.next(self._unfinished.keys(), num_sequences, is_paused=is_paused)
            match action:
                case AddRequests():
                    for name in action.request_ids:
                        self._begin(self._queue.take(name))
                case AbortRequests():
                    self._drop(action.request_ids)
                case GrantPause():
                    self._paused_for = self._queue.grant_pause()
                    self._tally.clock.enter(EngineActivity.paused)
                case RunStep():
                    self._tally.clock.enter(EngineActivity.decoding)
                    self._step()
                case WaitFor():
                    self._tally.clock.enter(EngineActivity.paused if is_paused else EngineActivity.idle)
        except Exception as error:
            self._fail(error)
            return WaitFor()
        return action

    def _run(self, command: _Command) -> None:
        if self._failure is not None:
            command.done.set_exception(GenerationError(self._failure))
            return
        try:
            command.done.set_result(command.run())
        except Exception as error:
            if is_out_of_memory(error) and self._failure is None and not self._did_not_start:
                self._fail(error)
            command.done.set_exception(error)

    def _step(self) -> None:
        started_s = time.monotonic()
        with span("generate"):
            outputs = self._engine.step()
        self._queue.num_steps += 1
        self._deliver([output for output in outputs if output.finished])
        taken_s = time.monotonic() - started_s
        self._tally.generation_s += taken_s
        if self._queue.is_draining:
            self._tally.draining_s += taken_s

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Call each sink once, with all of its groups that finished in this step."""
        by_sink: dict[int, tuple[ResultSink, list[GroupResult]]] = {}
        for output in outputs:
            check_places(self._unfinished[output.request_id].request, output)
        routes = self._routes.take([(self._unfinished[one.request_id].request, one) for one in outputs])
        for output in outputs:
            entry = self._unfinished.pop(output.request_id)
            responses = tuple(
                as_response(
                    completion,
                    routes.get((output.request_id, completion.index), NO_ROUTES),
                    with_versions=self._spec.weight_updates is not None,
                    is_masked=entry.is_masked,
                )
                for completion in output.outputs
            )
            result = GroupResult(output.request_id, responses, self._policy_version, self._weights_digest)
            self._queue.write_finished(result.request_id, [version_spans(one) for one in output.outputs])
            if self._queue.is_wanted(output.request_id):
                self._tally.count(result)
                for completion in output.outputs:
                    self._tally.count_drafts(completion.spec_decode_metrics)
                by_sink.setdefault(id(entry.sink), (entry.sink, []))[1].append(result)
        for sink, results in by_sink.values():
            sink.submit("on_groups", results)

    def _fail(self, error: Exception, doing: str = "") -> None:
        """Tell every sink that waits for results that the engine failed; every later call raises.

        The stack goes to this process's log. What vLLM raised makes the process count as dead, so that it is
        replaced; what a check of this project raised would come again. When a worker process is gone, end
        this process instead.
        """
        traceback.print_exception(error)
        if len(multiprocessing.active_children()) < self._num_processes:
            _end_process()
        reason = f"{doing}{in_short(error)}"
        self._failure = f"engine {self._name!r} failed: {reason}"
        if doing or not is_own(error):
            break_down(error, doing)
        waiting = self._queue.fail(GenerationError(self._failure))
        sinks = {id(entry.sink): entry.sink for entry in (*self._unfinished.values(), *waiting)}
        self._unfinished.clear()
        for sink in sinks.values():
            sink.submit("on_engine_error", self._name, reason)
        try:
            self._queue.flush()
        except Exception:
            traceback.print_exc()  # into the log, since callers hear of the first failure

    @property
    def _keeps_kv_cache(self) -> bool:
        """Whether samples under way go on with keys and values of earlier weights."""
        return (
            self._spec.weight_updates is WeightUpdates.in_flight
            and self._spec.generation.kv_cache_after_update is KvCacheAfterUpdate.keep
        )

    def _open_journal(self, journal: EngineJournal) -> None:
        if self._spec.weight_updates is None:
            raise ValueError(
                f"engine {self._name!r}: a journal needs weight_updates, without which there is no order to "
                "write down; open none"
            )
        if num_groups := len(self._unfinished) + len(self._queue.waiting):
            raise RuntimeError(
                f"engine {self._name!r} still generates {num_groups} groups, so no journal can begin"
            )
        settings = journal_settings(
            vllm.__version__,
            self._spec.generation,
            self._spec.weight_updates,
            {
                "device": self._spec.device.value,
                "precision": self._spec.precision.value,
                "seed": self._spec.seed,
                "max_total_sequence_length": self._spec.max_total_sequence_length,
            },
        )
        order = None
        if journal.replayed is not None:
            replayed = read_journal(Path(journal.replayed))
            replayed.check_settings(settings)
            order = JournalOrder(replayed)
        writer = JournalWriter(Path(journal.path), self._name, settings)
        self._queue.flush()
        self._queue = EngineQueue(self._queue.live, self._timeout_s, order, writer)

    def _start_engine(self) -> None:
        # The step thread builds the engine, since the current CUDA device is a thread's own.
        try:
            if self._reads_images and is_needed():
                patch_vllm()
            with one_gloo_device():
                self._engine = LLMEngine.from_engine_args(self._engine_args)
        except Exception as error:
            self._did_not_start = True
            raise GenerationError(f"engine {self._name!r} did not start: {error}") from error
        self._engine.set_weight_version(str(self._policy_version))
        # The tokens that the tokenizer never splits, by text.
        has_tokenizer = not self._engine_args.skip_tokenizer_init
        self._added_tokens: Mapping[str, int] = (
            self._engine.get_tokenizer().get_added_vocab() if has_tokenizer else {}
        )
        if self._spec.structured_outputs:
            self._rpc("return_unmasked_logprobs")
        if self._spec.device is Device.cpu and speculation(self._spec.generation) is not None:
            self._rpc("mend_draft_sampling")
        self._routes.start(self._engine)
        self._memory = EngineMemory(self._engine, self._spec.sleeps)
        self._num_processes = len(multiprocessing.active_children())
        if self._num_processes:
            self._engine.model_executor.register_failure_callback(_end_process)
            remove_names()
        # What the start leaves behind is never garbage, so no collection need look at it. A batch allocates
        # so many small objects that collections at Python's default rate take a twentieth of its time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)

    def _add(self, queued: Sequence[QueuedRequest]) -> None:
        self._check_awake()
        unfinished = {*self._unfinished, *self._queue.waiting}
        for one in queued:
            if one.request.request_id in unfinished:
                raise ValueError(f"request {one.request.request_id!r} is unfinished already; use another id")
            unfinished.add(one.request.request_id)
        if self._spec.weight_updates is not None:
            self._enqueue(queued)
            return
        if self._spec.adapter is not None and self._adapter is None and self._paused_for is not None:
            raise RuntimeError(
                f"engine {self._name!r} waits for its first adapters; a request that came now would be "
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

    def _enqueue(self, queued: Sequence[QueuedRequest]) -> None:
        """Have the requests wait for their turn. vLLM, which might refuse them, sees them only then."""
        for one in queued:
            num_tokens = len(one.request.prompt_ids)
            if num_tokens >= self._spec.max_total_sequence_length:
                raise ValueError(
                    f"request {one.request.request_id!r} has {num_tokens} tokens, which leaves no room for a "
                    f"response in {self._spec.max_total_sequence_length}; use shorter prompts or raise "
                    "policy.max_total_sequence_length"
                )
        self._queue.waiting.update({one.request.request_id: one for one in queued})

    def _begin(self, queued: QueuedRequest) -> None:
        """Give a request to vLLM."""
        request, prompt = queued.request, self._prompt(queued.request)
        if self._keeps_kv_cache:
            # Keys and values of old weights stay in the cache for samples under way, and for no others.
            prompt["cache_salt"] = str(self._num_loads)
        engine_id = self._engine.add_request(
            request.request_id, prompt, queued.params, lora_request=self._adapter
        )
        self._routes.add(request, engine_id)
        self._unfinished[request.request_id] = queued

    def _prompt(self, request: GroupRequest) -> Any:
        """Return a prompt as vLLM takes it; where it has an image vLLM itself repeats the image's token."""
        if not request.images:
            return tokens_input(list(request.prompt_ids))
        token = self._engine.model_config.hf_config.image_token_id
        ids = [
            one
            for one, before in zip(request.prompt_ids, (None, *request.prompt_ids), strict=False)
            if (one, before) != (token, token)
        ]
        images = [decoded(file) for file in request.images]
        return {"prompt_token_ids": ids, "multi_modal_data": {"image": images}}

    def _score(self, sequences: Sequence[Sequence[int]], top_k: int) -> PromptScores:
        if self._unfinished or self._queue.waiting:
            raise RuntimeError(f"engine {self._name!r} still generates, so it cannot score tokens")
        self._check_awake()
        names = [f"score-{place}" for place in range(len(sequences))]
        engine_ids: list[str] = []
        try:
            for name, token_ids in zip(names, sequences, strict=True):
                prompt, params = tokens_input(list(token_ids)), scoring_params(top_k)
                engine_ids.append(self._engine.add_request(name, prompt, params, lora_request=self._adapter))
        except Exception:
            self._engine.abort_request(names[: len(engine_ids)])
            raise
        finished: dict[str, RequestOutput] = {}
        try:
            while len(finished) < len(names):
                finished |= {one.request_id: one for one in self._engine.step() if one.finished}
        except Exception as error:
            self._fail(error)
            raise
        self._routes.forget(engine_ids)
        return packed_scores([len(one) for one in sequences], [finished[name] for name in names], top_k)

    def _abort(self, request_ids: Sequence[str]) -> None:
        self._drop(self._queue.abort(request_ids, self._unfinished.keys()))

    def _drop(self, request_ids: Sequence[str]) -> None:
        """Take those of the requests that it has from vLLM."""
        known = {name: queued for name in request_ids if (queued := self._unfinished.pop(name, None))}
        self._engine.abort_request(list(known))
        for name, queued in known.items():
            self._routes.drop(name, queued.num_responses)

    def _rpc(self, method: str, **kwargs: Any) -> Any:
        """Call every worker of this engine, and return the first one's answer."""
        return call_workers(self._engine, method, kwargs)

    def _pause(self, version: int) -> Future[None]:
        """Return what resolves when the engine is paused."""
        if version < self._policy_version:
            raise ValueError(
                f"engine {self._name!r} is at policy_version={self._policy_version}; "
                f"version={version} is older"
            )
        # While the engine is paused, unfinished requests do no harm: nothing was sampled for them yet.
        if self._unfinished and self._paused_for is None and self._spec.weight_updates is None:
            raise RuntimeError(
                f"engine {self._name!r} still generates {len(self._unfinished)} groups; one group must not "
                "mix policy versions; wait for them or abort them before a weight update"
            )
        if self._memory.holds is EngineHolds.nothing:
            raise RuntimeError(f"engine {self._name!r} sleeps, so there is no room for weights to load")
        granted = self._queue.ask_pause(version)
        if self._spec.weight_updates is None:
            self._paused_for = self._queue.grant_pause()
        else:
            self._paused_for = None  # a pause for another version comes in its turn too
        return granted

    def _withdraw_pause(self, granted: Future[None]) -> str:
        """Go on without the pause, and return what it waited for."""
        if granted.done():
            self._paused_for = None
            return "it has done so now, too late"
        self._queue.give_up_pause(RuntimeError("it took too long"))
        if awaited := self._queue.awaited:
            return f"it waits for {awaited}"
        groups = list(self._unfinished)
        return f"{len(groups)} groups have not ended, such as {groups[:1]}"

    def _fetch_weights(self, transfer: Transfer, groups: Sequence[str]) -> None:
        self._check_paused(transfer.version)
        self._rpc("fetch_weights", transfer=transfer, groups=groups)

    def _load_weights(self, version: int, groups: Sequence[str]) -> int:
        self._check_paused(version)
        try:
            load = self._load_adapter if self._spec.adapter is not None else self._load_model
            self._weights_digest = load(groups)
            self._memory.weights_came()
            self._forget_old_values()
        except Exception as error:
            # Half-loaded weights serve nobody, whatever went wrong.
            self._fail(error, f"loading policy version {version} broke off: ")
            raise GenerationError(self._failure) from error
        self._policy_version, self._paused_for = version, None
        self._num_loads += 1
        self._engine.set_weight_version(str(version))
        self._queue.took_weights(version, list(self._unfinished))
        return version

    def _forget_old_values(self) -> None:
        """Drop cached keys, values and features of images, which were computed with the old weights."""
        if not (self._keeps_kv_cache and self._unfinished):
            drop_keys_and_values(self._engine, under_way=self._spec.weight_updates is not None)
        self._engine.reset_encoder_cache()

    def _load_model(self, groups: Sequence[str]) -> int | None:
        """Load whole weights, and return their digest."""
        digest: int | None = self._rpc("load_weight_groups", groups=groups)
        return digest

    def _load_adapter(self, groups: Sequence[str]) -> int | None:
        """Load adapters in place of those before, and return their digest.

        vLLM loads adapters from a directory only. This one lies in memory, and is gone when they are loaded.
        """
        with tempfile.TemporaryDirectory(
            dir=_SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else None
        ) as path:
            digest: int | None = self._rpc("write_adapter", groups=groups, path=path)
            self._engine.add_lora(LoRARequest("policy", 1, path, load_inplace=True))
            self._adapter = LoRARequest("policy", 1, path)
        return digest

    def _resume(self, transfer: Transfer) -> int:
        self._rpc("give_up_weights", transfer=transfer)
        self._queue.give_up_pause(RuntimeError("the trainer gave the transfer up"))
        self._paused_for = None
        return self._policy_version

    def _check_awake(self) -> None:
        if self._memory.holds is not EngineHolds.everything:
            raise RuntimeError(f"engine {self._name!r} sleeps, so it cannot generate")

    def _hold(self, what: EngineHolds) -> None:
        if num_groups := len(self._unfinished) + len(self._queue.waiting):
            raise RuntimeError(
                f"engine {self._name!r} still generates {num_groups} groups, so it cannot sleep"
            )
        try:
            self._memory.hold(what)
        except RuntimeError as error:
            raise RuntimeError(f"engine {self._name!r} cannot hold {what.value}: {error}") from error

    def _check_paused(self, version: int) -> None:
        if self._paused_for != version:
            raise RuntimeError(
                f"engine {self._name!r} is paused for version {self._paused_for}, not for {version}"
            )


def _end_process() -> None:
    """End this process, whose engine has lost a worker and is of no more use, so that it can be replaced.

    vLLM has written to the log which worker died.
    """
    os._exit(1)
