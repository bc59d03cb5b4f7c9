"""Records in a vLLM worker which experts its routers choose, where vLLM cannot return them itself.

    router ──▶ experts[KV slot, layer]                        at every forward pass
    execute_model ──▶ finished[request], before its blocks are used anew ──▶ take_routes

Experts are recorded by the token's slot in the KV cache. When the prefix cache gives a request the slots of
another request, they have the experts that were chosen when the slots were filled. A request that is
preempted is computed anew in other slots; its tokens keep the experts of the first time, which sampled them.

Private parts: ``MoERunner``, the forward context and the model runner of vllm 0.32.0. vLLM's own option
``enable_return_routed_experts`` needs its model runner V2, which does not run on CPUs. This module can go
with a vLLM whose option works there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.fused_moe.layer import MoERunner


class RouteRecorderExtension:
    """Methods that vLLM mixes into every worker; the engine calls each of them on every worker."""

    # vLLM's worker has these.
    rank: int
    model_runner: Any

    def record_routes(self, shape: tuple[int, int], dtype: str) -> int:
        """Begin to record, and return how many layers have experts. All workers of an engine choose the same
        experts, so only the first worker records. ``shape`` is [layers, k] of a token, and ``dtype`` numpy's
        name of the type for experts' numbers. When the model has another number of layers, record nothing."""
        runner = self.model_runner
        layers = [module for module in runner.get_model().modules() if isinstance(module, MoERunner)]
        if self.rank == 0 and len(layers) == shape[0]:
            vars(self)["_route_recorder"] = RouteRecorder(runner, layers, shape, dtype)
        return len(layers)

    def take_routes(
        self, wanted: Mapping[str, tuple[int, int]], dropped: Sequence[str]
    ) -> dict[str, np.ndarray] | None:
        """Return the experts of the finished requests ``wanted``, as ``RouteRecorder.take`` does, and forget
        the requests ``dropped``. All workers but the first return None."""
        recorder = vars(self).get("_route_recorder")
        return None if recorder is None else recorder.take(wanted, dropped)


class RouteRecorder:
    """Keeps the experts of every token in the KV cache, numbered from 1; 0: nothing was recorded."""

    def __init__(self, runner: Any, layers: Sequence[Any], shape: tuple[int, int], dtype: str) -> None:
        """Watch the routers of ``layers`` from now on."""
        self._runner = runner
        self._block_size: int = runner.cache_config.block_size
        num_slots = runner.kv_cache_config.num_blocks * self._block_size
        self._experts = np.zeros((num_slots, *shape), dtype)
        # Experts of ended requests until they are taken, and of preempted requests up to the preemption.
        self._finished: dict[str, np.ndarray] = {}
        self._preempted: dict[str, np.ndarray] = {}
        # Requests that were taken before vLLM's workers heard that they have ended.
        self._taken_early: set[str] = set()
        for index, layer in enumerate(sorted(layers, key=lambda one: one.layer_id)):
            layer.router.set_capture_fn(partial(self._keep, index))
        self._execute = runner.execute_model
        runner.execute_model = self._execute_recorded

    def take(self, wanted: Mapping[str, tuple[int, int]], dropped: Sequence[str]) -> dict[str, np.ndarray]:
        """Return [stop - first, layers, k] of each request, by vLLM's id: the experts of its tokens from
        ``first`` to ``stop``.

        Raises RuntimeError for tokens without recorded experts.
        """
        for request_id in dropped:
            self._finished.pop(request_id, None)
        return {request_id: self._take(request_id, *tokens) for request_id, tokens in wanted.items()}

    def _take(self, request_id: str, first: int, stop: int) -> np.ndarray:
        rows = self._finished.pop(request_id, None)
        if rows is None:
            rows = self._of_request(request_id)
            self._taken_early.add(request_id)
        rows = rows[first:stop]
        if len(rows) != stop - first or not rows.all():
            raise RuntimeError(
                f"request {request_id!r}: of the tokens {first} to {stop} in the KV cache "
                f"{int(rows.all(axis=(1, 2)).sum())} have recorded experts"
            )
        return rows

    def _keep(self, layer: int, chosen: torch.Tensor) -> None:
        """Keep the experts that the router of the ``layer``-th layer chose for a batch's tokens, [tokens,
        k]."""
        slots_of_layers = get_forward_context().slot_mapping
        if not slots_of_layers:
            return  # a forward pass without a KV cache, of vLLM's start
        assert isinstance(slots_of_layers, dict)
        slots = next(iter(slots_of_layers.values()))[: len(chosen)].numpy()
        is_token = slots >= 0
        self._experts[slots[is_token], layer] = chosen.numpy()[: len(slots)][is_token] + 1

    def _execute_recorded(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Copy the experts of requests that have ended or lost their blocks, then let vLLM make the step, in
        which other requests may get these blocks."""
        for request_id in scheduler_output.preempted_req_ids or ():
            if request_id in self._runner.requests:
                self._preempted[request_id] = self._of_request(request_id)
        for request_id in scheduler_output.finished_req_ids:
            if request_id in self._runner.requests and request_id not in self._taken_early:
                self._finished[request_id] = self._of_request(request_id)
            self._preempted.pop(request_id, None)
            self._taken_early.discard(request_id)
        return self._execute(scheduler_output, *args, **kwargs)

    def _of_request(self, request_id: str) -> np.ndarray:
        """Return the experts of all tokens of a request but its last sampled token, which was not read."""
        request = self._runner.requests[request_id]
        (blocks,) = request.block_ids
        tokens = np.arange(min(request.num_tokens - 1, len(blocks) * self._block_size))
        slots = np.asarray(blocks)[tokens // self._block_size] * self._block_size + tokens % self._block_size
        experts = self._experts[slots]
        if (earlier := self._preempted.get(request_id)) is not None:
            # Preempted once more while it was computed anew, it may have fewer tokens than before.
            experts = np.concatenate([earlier, experts[len(earlier) :]])
        return experts
