"""Returns the experts that an engine's routers chose, so that the trainer's routers can choose the same.

on a GPU   vLLM's enable_return_routed_experts ──▶ CompletionOutput.routed_experts ─┐
on a CPU   RouteRecorderExtension in vLLM's workers ──▶ take_routes ────────────────┴─▶ Response
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.outputs import CompletionOutput

from nemo_like.batch.columns import Column
from nemo_like.compat.worker_calls import call_workers
from nemo_like.generation.interface import GenerationError, GroupRequest
from nemo_like.policy.options import Device

_KEY = "policy.megatron_cfg.router_replay=true"


@dataclass(frozen=True, slots=True)
class ResponseRoutes:
    """The experts of a response's tokens, [L, layers, k], and of its request's prompt from token
    ``num_known`` on, [prompt - num_known, layers, k]; each by column name, {} where the engine returns no
    experts."""

    columns: dict[str, np.ndarray]
    context_columns: dict[str, np.ndarray]


NO_ROUTES = ResponseRoutes({}, {})


class EngineRoutes:
    """Collects the experts of one engine's requests."""

    def __init__(self, column: Column | None, device: Device) -> None:
        """Collect the experts for ``column``; collect nothing where it is None."""
        self._column = column
        # On CPUs vLLM accepts the option, but its model runner there does not implement it.
        self._is_native = column is not None and device is Device.cuda
        self._engine: LLMEngine
        self._ids: dict[str, str] = {}  # vLLM's own ids of the unfinished requests
        self._dropped: list[str] = []  # ids of requests whose experts the workers may discard

    def configure(self, args: EngineArgs) -> None:
        """Set vLLM's option ``enable_return_routed_experts`` where it works: on GPUs."""
        args.enable_return_routed_experts = self._is_native

    def ask(self, request: GroupRequest, params: SamplingParams) -> None:
        """Tell vLLM, where it returns experts itself, to leave out the request's first ``num_known``
        tokens."""
        if self._is_native:
            params.routed_experts_prompt_start = request.num_known

    def start(self, engine: LLMEngine) -> None:
        """Let the engine's workers record experts, where vLLM does not return them. Raises GenerationError
        when the model has another number of layers with experts than the column."""
        self._engine = engine
        if self._column is None or self._is_native:
            return
        num_layers = call_workers(
            engine, "record_routes", {"shape": self._column.inner_shape, "dtype": self._column.dtype}
        )
        if num_layers != self._column.inner_shape[0]:
            raise GenerationError(
                f"{_KEY} needs the experts of {self._column.inner_shape[0]} layers, and the engine has "
                f"{num_layers} layers with experts; set it to false"
            )

    def add(self, request: GroupRequest, engine_id: str) -> None:
        """Remember the id under which vLLM computes the request."""
        if self._column is not None:
            self._ids[request.request_id] = engine_id

    def drop(self, request_id: str, num_responses: int) -> None:
        """Forget an aborted request."""
        if (engine_id := self._ids.pop(request_id, None)) is not None:
            self.forget([_id_of(engine_id, index, num_responses) for index in range(num_responses)])

    def forget(self, engine_ids: Sequence[str]) -> None:
        """Let the workers discard the experts of these requests (vLLM's ids), which nobody will ask for."""
        if self._column is not None:
            self._dropped += engine_ids

    def take(
        self, finished: Sequence[tuple[GroupRequest, RequestOutput]]
    ) -> dict[tuple[str, int], ResponseRoutes]:
        """Return the experts of the responses that just finished, by request id and index of the response; {}
        where no column asks for experts.

        Raises GenerationError when the engine returned no experts.
        """
        if self._column is None or not finished:
            return {}
        taken = dict(self._native(finished) if self._is_native else self._recorded(finished))
        return {
            (request.request_id, completion.index): self._cut(
                taken[request.request_id, completion.index], request, completion
            )
            for request, output in finished
            for completion in output.outputs
        }

    def _native(self, finished: Sequence[tuple[GroupRequest, RequestOutput]]) -> Iterator[Any]:
        """Yield the experts that vLLM itself returned, numbered from 1."""
        assert self._column is not None
        for request, output in finished:
            self._ids.pop(request.request_id)
            for completion in output.outputs:
                if completion.routed_experts is None:
                    raise GenerationError(
                        f"{_KEY} needs the experts of every token, and vLLM returned none for request "
                        f"{request.request_id!r}; install the version of requirements/, without "
                        "VLLM_USE_V2_MODEL_RUNNER=0, or set it to false"
                    )
                experts = completion.routed_experts.astype(self._column.dtype) + 1
                yield (request.request_id, completion.index), experts

    def _recorded(self, finished: Sequence[tuple[GroupRequest, RequestOutput]]) -> Iterator[Any]:
        """Yield the experts that the workers recorded; one call to the workers asks for all."""
        wanted, keys = {}, {}
        for request, output in finished:
            engine_id = self._ids.pop(request.request_id)
            for completion in output.outputs:
                name = _id_of(engine_id, completion.index, len(request.seeds))
                stop = len(request.prompt_ids) + len(completion.token_ids) - 1
                wanted[name] = (request.num_known, stop)
                keys[name] = (request.request_id, completion.index)
        dropped, self._dropped = self._dropped, []
        taken = call_workers(self._engine, "take_routes", {"wanted": wanted, "dropped": dropped})
        for name, key in keys.items():
            yield key, taken[name]

    def _cut(self, rows: np.ndarray, request: GroupRequest, completion: CompletionOutput) -> ResponseRoutes:
        """Divide the experts of the tokens from ``num_known`` on between prompt and response. The response's
        last token gets 0, since the engine has not read it."""
        assert self._column is not None
        num_context = len(request.prompt_ids) - request.num_known
        num_rows = num_context + len(completion.token_ids) - 1
        if rows.shape != (num_rows, *self._column.inner_shape):
            raise GenerationError(
                f"{_KEY}: request {request.request_id!r} has {num_rows} tokens with experts of shape "
                f"{list(self._column.inner_shape)}, and the engine returned {list(rows.shape)}"
            )
        unread = np.zeros((1, *self._column.inner_shape), self._column.dtype)
        return ResponseRoutes(
            {self._column.name: np.concatenate([rows[num_context:], unread])},
            {self._column.name: rows[:num_context]},
        )


def _id_of(engine_id: str, index: int, num_responses: int) -> str:
    """Return vLLM's id of one response: vLLM splits a request for several responses into one for each."""
    return engine_id if num_responses == 1 else f"{index}_{engine_id}"
