"""``VllmEngine``: one in-process vLLM engine. One thread steps it, and runs all calls, which come by a queue.

    caller's thread                     step thread
      submit, abort, pause,   ──queue──▶  run commands, then engine.step(), again and again
      load_weights, stats                      │ groups that finished in this step
                                               └─▶ sink.submit("on_groups", results)

With nothing to decode the step thread blocks on the queue. It also receives weights, so no step runs with
half of them.
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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import ray
from vllm import LLMEngine, RequestOutput, SamplingParams
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from nemo_like.batch.columns import Column
from nemo_like.cluster.gloo import one_gloo_device
from nemo_like.cluster.runtime import use_temporary_directory_of_session
from nemo_like.config.derived import EngineAdapter
from nemo_like.config.gpu_stages import EngineHolds
from nemo_like.config.model_info import has_vision_tower
from nemo_like.config.schema import Device, GenerationConfig, Precision
from nemo_like.config.tasks import SamplingSettings
from nemo_like.data.images import decoded
from nemo_like.generation.engine_args import engine_args
from nemo_like.generation.engine_routes import NO_ROUTES, EngineRoutes, ResponseRoutes
from nemo_like.generation.interface import (
    EngineOverdue,
    EngineStats,
    GenerationError,
    GroupRequest,
    GroupResult,
    Response,
    ResultSink,
    WeightEndpoint,
    WeightGroup,
)
from nemo_like.generation.prompt_scores import PromptScores, packed_scores, scoring_params
from nemo_like.generation.shared_names import remove_names, track_names
from nemo_like.generation.sleep import EngineMemory, Sleeps, has_sleep_mode
from nemo_like.generation.without_torchvision import is_needed, patch_vllm
from nemo_like.observability.trace import span
from nemo_like.weight_transport.connections import Transfer

_T = TypeVar("_T")

# After so many net allocations Python collects the youngest generation.
_GC_THRESHOLD = 50_000
_SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[], Any]
    done: Future[Any]


@dataclass(frozen=True, slots=True)
class _Unfinished:
    request: GroupRequest
    sink: ResultSink


class VllmEngine:
    """A ``GenerationEngine`` and ``WeightReceiver``, where the methods are described.

    It belongs in a serial actor whose process was started with ``engine_environment``.
    """

    def __init__(
        self,
        *,
        name: str,
        model_name: str,
        generation: GenerationConfig,
        device: Device,
        precision: Precision,
        max_total_sequence_length: int,
        seed: int,
        timeout_s: float,
        tokenizer_name: str | None = None,
        sleeps: Sleeps = Sleeps.never,
        adapter: EngineAdapter | None = None,
        routed_experts: Column | None = None,
    ) -> None:
        """Start the engine and wait until it is ready.

        ``timeout_s`` is the deadline for the start, and for every later call. Without ``tokenizer_name`` the
        engine knows token ids alone, and refuses stop strings. An engine that ``sleeps`` needs a GPU. With
        ``adapter`` a weight transfer brings such adapters, which the engine computes beside the checkpoint's
        weights. With ``routed_experts`` responses bring this column.

        Raises GenerationError when the engine does not start, ValueError when it should sleep but cannot.
        """
        use_temporary_directory_of_session()  # since vLLM leaves sockets and files behind
        self._name, self._sleeps = name, sleeps
        self._timeout_s = timeout_s
        self._num_workers = generation.vllm_cfg.tensor_parallel_size
        if self._num_workers > 1:
            track_names()
        self._engine_args = engine_args(
            model_name, generation, device, precision, max_total_sequence_length, seed, adapter
        )
        self._routes = EngineRoutes(routed_experts, device)
        self._routes.configure(self._engine_args)
        self._engine_args.enable_sleep_mode = has_sleep_mode(name, sleeps, device)
        self._reads_images = has_vision_tower(model_name)
        if self._reads_images:  # vLLM needs the tokenizer to process images
            tokenizer_name = model_name
        if tokenizer_name is not None:
            self._engine_args.tokenizer = tokenizer_name
            self._engine_args.skip_tokenizer_init = False
        self._engine: LLMEngine
        self._failure: str | None = None
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._unfinished: dict[str, _Unfinished] = {}
        self._policy_version = -1
        # What each request needs to be computed with the adapter; None where there is none.
        self._adapter: LoRARequest | None = None
        self._has_adapters = adapter is not None
        self._weights_digest: int | None = None
        self._paused_for: int | None = None
        self._generation_s = 0.0
        self._num_generated_tokens = 0
        self._num_processes = 0  # of the engine's workers, this process not counted
        self._did_not_start = False
        self._thread = threading.Thread(target=self._serve, name=f"{name}-step", daemon=True)
        self._thread.start()
        self._call(self._start_engine)

    # ------------------------------------------------------------------ generation

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingSettings, sink: ResultSink) -> None:
        """Queue the requests; the sink gets each group's result after the engine step that finishes it.

        Raises ValueError when a request cannot be served; then none of this call's requests is queued.
        """
        params = [_sampling_params(request, sampling) for request in requests]
        for request, one in zip(requests, params, strict=True):
            self._routes.ask(request, one)
        self._call(lambda: self._add(requests, params, sink))

    def abort(self, request_ids: Sequence[str]) -> None:
        self._call(lambda: self._abort(request_ids))

    def abort_all(self) -> None:
        self._call(lambda: self._abort(list(self._unfinished)))

    def stats(self) -> EngineStats:
        return self._call(
            lambda: EngineStats(self._policy_version, self._generation_s, self._num_generated_tokens)
        )

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
        self._call(lambda: self._pause(version))

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
        while not self._did_not_start:
            self._run_commands()
            if not self._is_idle():
                self._step()

    def _is_idle(self) -> bool:
        return self._paused_for is not None or not self._unfinished

    def _run_commands(self) -> None:
        """Run all queued commands; when there is nothing to decode, wait for one first."""
        try:
            command = self._commands.get(block=self._is_idle())
            while True:
                self._run(command)
                command = self._commands.get(block=False)
        except queue.Empty:
            pass

    def _run(self, command: _Command) -> None:
        if self._failure is not None:
            command.done.set_exception(GenerationError(self._failure))
            return
        try:
            command.done.set_result(command.run())
        except Exception as error:
            command.done.set_exception(error)

    def _step(self) -> None:
        started_s = time.monotonic()
        try:
            with span("generate"):
                outputs = self._engine.step()
            self._deliver([output for output in outputs if output.finished])
        except Exception:
            self._fail(traceback.format_exc())
        self._generation_s += time.monotonic() - started_s

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Call each sink once, with all of its groups that finished in this step."""
        by_sink: dict[int, tuple[ResultSink, list[GroupResult]]] = {}
        for output in outputs:
            _check_places(self._unfinished[output.request_id].request, output)
        routes = self._routes.take([(self._unfinished[one.request_id].request, one) for one in outputs])
        for output in outputs:
            entry = self._unfinished.pop(output.request_id)
            responses = tuple(
                _response(completion, routes.get((output.request_id, completion.index), NO_ROUTES))
                for completion in output.outputs
            )
            self._num_generated_tokens += sum(len(response.token_ids) for response in responses)
            _, results = by_sink.setdefault(id(entry.sink), (entry.sink, []))
            results.append(
                GroupResult(output.request_id, responses, self._policy_version, self._weights_digest)
            )
        for sink, results in by_sink.values():
            sink.submit("on_groups", results)

    def _fail(self, trace: str) -> None:
        """Tell every sink that waits for results that the engine failed; every later call raises.

        When a worker process is gone, end this process instead.
        """
        if len(multiprocessing.active_children()) < self._num_processes:
            _end_process()
        self._failure = f"engine {self._name!r} failed:\n{trace}"
        sinks = {id(entry.sink): entry.sink for entry in self._unfinished.values()}
        self._unfinished.clear()
        for sink in sinks.values():
            sink.submit("on_engine_error", self._name, trace)

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
        self._routes.start(self._engine)
        self._memory = EngineMemory(self._engine)
        self._num_processes = len(multiprocessing.active_children())
        if self._num_processes:
            self._engine.model_executor.register_failure_callback(_end_process)
            remove_names()
        # What the start leaves behind is never garbage, so no collection need look at it. A batch allocates
        # so many small objects that collections at Python's default rate take a twentieth of its time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)

    def _add(
        self, requests: Sequence[GroupRequest], params: Sequence[SamplingParams], sink: ResultSink
    ) -> None:
        added: list[str] = []
        self._check_awake()
        if self._has_adapters and self._adapter is None and self._paused_for is not None:
            raise RuntimeError(
                f"engine {self._name!r} waits for its first adapters; a request that came now would be "
                "sampled without them; submit it after the weight update"
            )
        try:
            for request, request_params in zip(requests, params, strict=True):
                if request.request_id in self._unfinished:
                    raise ValueError(f"request {request.request_id!r} is unfinished already; use another id")
                prompt = self._prompt(request)
                engine_id = self._engine.add_request(
                    request.request_id, prompt, request_params, lora_request=self._adapter
                )
                self._routes.add(request, engine_id)
                self._unfinished[request.request_id] = _Unfinished(request, sink)
                added.append(request.request_id)
        except Exception:
            self._abort(added)
            raise

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
        if self._unfinished:
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
        except Exception:
            self._fail(traceback.format_exc())
            raise
        self._routes.forget(engine_ids)
        return packed_scores([len(one) for one in sequences], [finished[name] for name in names], top_k)

    def _abort(self, request_ids: Sequence[str]) -> None:
        known = {one: entry for one in request_ids if (entry := self._unfinished.pop(one, None))}
        self._engine.abort_request(list(known))
        for request_id, entry in known.items():
            self._routes.drop(request_id, len(entry.request.seeds))

    def _rpc(self, method: str, **kwargs: Any) -> Any:
        """Call every worker of this engine, and return the first one's answer."""
        return self._engine.collective_rpc(method, kwargs=kwargs)[0]

    def _pause(self, version: int) -> None:
        if version < self._policy_version:
            raise ValueError(
                f"engine {self._name!r} is at policy_version={self._policy_version}; "
                f"version={version} is older"
            )
        # While the engine is paused, unfinished requests do no harm: nothing was sampled for them yet.
        if self._unfinished and self._paused_for is None:
            raise RuntimeError(
                f"engine {self._name!r} still generates {len(self._unfinished)} groups; one group must not "
                "mix policy versions; wait for them or abort them before a weight update"
            )
        if self._memory.holds is EngineHolds.nothing:
            raise RuntimeError(f"engine {self._name!r} sleeps, so there is no room for weights to load")
        self._paused_for = version

    def _fetch_weights(self, transfer: Transfer, groups: Sequence[str]) -> None:
        self._check_paused(transfer.version)
        self._rpc("fetch_weights", transfer=transfer, groups=groups)

    def _load_weights(self, version: int, groups: Sequence[str]) -> int:
        self._check_paused(version)
        try:
            load = self._load_adapter if self._has_adapters else self._load_model
            self._weights_digest = load(groups)
            # Cached keys, values and features of images were computed with the old weights.
            self._engine.reset_prefix_cache()
            self._engine.reset_encoder_cache()
        except Exception:
            self._fail(
                f"loading policy version {version} broke off, and half-loaded weights serve nobody\n"
                + traceback.format_exc()
            )
            raise
        self._policy_version, self._paused_for = version, None
        return version

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
        self._paused_for = None
        return self._policy_version

    def _check_awake(self) -> None:
        if self._memory.holds is not EngineHolds.everything:
            raise RuntimeError(f"engine {self._name!r} sleeps, so it cannot generate")

    def _hold(self, what: EngineHolds) -> None:
        if self._sleeps is Sleeps.never:
            raise RuntimeError(f"engine {self._name!r} was not started to sleep: it has a device of its own")
        if self._unfinished:
            raise RuntimeError(
                f"engine {self._name!r} still generates {len(self._unfinished)} groups, so it cannot sleep"
            )
        self._memory.hold(what)

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


def _sampling_params(request: GroupRequest, sampling: SamplingSettings) -> SamplingParams:
    num_responses = len(request.seeds)
    if sampling.temperature == 0 and num_responses > 1:
        raise ValueError(
            f"request {request.request_id!r}: {num_responses} greedy responses would be the same; ask for one"
        )
    return SamplingParams(
        n=num_responses,
        seed=request.seeds[0],
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        max_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        stop=list(sampling.stop_strings),
        ignore_eos=True,  # only the stop tokens and strings of the settings end a response
        logprobs=0,  # only that of the sampled token
        flat_logprobs=True,
        detokenize=bool(sampling.stop_strings),  # only where needed: it takes a fifth of the time
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # vLLM need not copy an object that was made for this one request
    )


def _check_places(request: GroupRequest, output: RequestOutput) -> None:
    """Raise GenerationError when images take other places in the engine's prompt than in the request's, whose
    tokens the trainer will read."""
    if request.images and tuple(output.prompt_token_ids or ()) != request.prompt_ids:
        raise GenerationError(
            f"request {request.request_id!r}: the engine's prompt has {len(output.prompt_token_ids or ())} "
            f"tokens with its images, and the request's {len(request.prompt_ids)}; both must come from the "
            "checkpoint's image processor"
        )


def _response(completion: CompletionOutput, routes: ResponseRoutes) -> Response:
    return Response(
        token_ids=np.asarray(completion.token_ids, dtype=np.int32),
        logprobs=np.asarray(completion.logprobs.logprobs, dtype=np.float32),
        is_truncated=completion.finish_reason == "length",
        columns=routes.columns,
        context_columns=routes.context_columns,
    )
