"""``VllmWeights``: takes new weights from a trainer, and gives up device memory while the engine sleeps.

pause ──▶ fetch ──▶ load, or resume            ``WeightReceiver`` describes each call
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from vllm.lora.request import LoRARequest

from nemo_like.cluster.stage import EngineHolds
from nemo_like.generation.interface import GenerationError, WeightGroup
from nemo_like.generation.prefix_cache import drop_keys_and_values
from nemo_like.generation.request_loop import RequestLoop
from nemo_like.generation.started_vllm import StartedVllm
from nemo_like.weight_transport.connections import Transfer

_SHARED_MEMORY = "/dev/shm"


class VllmWeights:
    """The weights of one ``VllmEngine``. Only the engine's step thread calls it."""

    def __init__(
        self,
        started: StartedVllm,
        requests: RequestLoop,
        fail: Callable[[Exception, str], GenerationError],
    ) -> None:
        """Take care of the engine's weights; ``fail`` is ``EngineThread.fail``."""
        self._vllm, self._requests, self._fail = started, requests, fail
        self._in_force = started.weights

    def join(self, group: WeightGroup) -> None:
        """Have every vLLM worker begin to join the group by which weights arrive."""
        self._vllm.ask_workers("join_weight_group", group=group)

    def pause(self, version: int) -> Future[None]:
        """Ask for a pause; return a future that resolves when the engine is paused."""
        if version < self._in_force.policy_version:
            raise ValueError(
                f"engine {self._vllm.name!r} is at policy_version={self._in_force.policy_version}; "
                f"version={version} is older"
            )
        is_between_batches = self._vllm.spec.weight_updates is None
        # While the engine is paused, unfinished requests do no harm: nothing was sampled for them yet.
        if self._requests.unfinished and self._in_force.paused_for is None and is_between_batches:
            raise RuntimeError(
                f"engine {self._vllm.name!r} still generates {len(self._requests.unfinished)} groups; one "
                "group must not mix policy versions; wait for them or abort them before a weight update"
            )
        if self._vllm.memory.holds is EngineHolds.nothing:
            raise RuntimeError(f"engine {self._vllm.name!r} sleeps, so there is no room for weights to load")
        granted = self._requests.queue.ask_pause(version)
        # With weight_updates the step thread grants the pause when its turn comes.
        self._in_force.paused_for = self._requests.queue.grant_pause() if is_between_batches else None
        return granted

    def withdraw_pause(self, granted: Future[None]) -> str:
        """Withdraw the pause, and return a text that says what it waited for."""
        if granted.done():
            self._in_force.paused_for = None
            return "it has done so now, too late"
        self._requests.queue.give_up_pause(RuntimeError("it took too long"))
        if awaited := self._requests.queue.awaited:
            return f"it waits for {awaited}"
        groups = list(self._requests.unfinished)
        return f"{len(groups)} groups have not ended, such as {groups[:1]}"

    def fetch(self, transfer: Transfer, groups: Sequence[str]) -> None:
        """Wait for the tensors that the trainer offers in these groups before the load."""
        self._check_paused(transfer.version)
        self._vllm.ask_workers("fetch_weights", transfer=transfer, groups=groups)

    def load(self, version: int, groups: Sequence[str]) -> int:
        """Load every tensor of these groups, resume sampling, and return the version."""
        self._check_paused(version)
        try:
            load = self._load_adapter if self._vllm.spec.adapter is not None else self._load_model
            self._in_force.digest = load(groups)
            self._vllm.memory.weights_came()
            self._forget_old_values()
        except Exception as error:
            # Half-loaded weights serve nobody, whatever went wrong.
            raise self._fail(error, f"loading policy version {version} broke off: ") from error
        self._in_force.policy_version, self._in_force.paused_for = version, None
        self._in_force.num_loads += 1
        self._vllm.llm.set_weight_version(str(version))
        self._requests.queue.took_weights(version, list(self._requests.unfinished))
        return version

    def resume(self, transfer: Transfer) -> int:
        """Give the transfer up, resume with the version in force, and return that version."""
        self._vllm.ask_workers("give_up_weights", transfer=transfer)
        self._requests.queue.give_up_pause(RuntimeError("the trainer gave the transfer up"))
        self._in_force.paused_for = None
        return self._in_force.policy_version

    def hold(self, what: EngineHolds) -> None:
        """Hold exactly this part of the device's memory from now on."""
        if num_groups := self._requests.num_groups:
            raise RuntimeError(
                f"engine {self._vllm.name!r} still generates {num_groups} groups, so it cannot sleep"
            )
        try:
            self._vllm.memory.hold(what)
        except RuntimeError as error:
            raise RuntimeError(f"engine {self._vllm.name!r} cannot hold {what.value}: {error}") from error

    def _forget_old_values(self) -> None:
        """Drop the cached keys, values and image features that the old weights computed."""
        if not (self._vllm.keeps_kv_cache and self._requests.unfinished):
            drop_keys_and_values(self._vllm.llm, under_way=self._vllm.spec.weight_updates is not None)
        self._vllm.llm.reset_encoder_cache()

    def _load_model(self, groups: Sequence[str]) -> int | None:
        """Load whole weights, and return their digest."""
        digest: int | None = self._vllm.ask_workers("load_weight_groups", groups=groups)
        return digest

    def _load_adapter(self, groups: Sequence[str]) -> int | None:
        """Load new adapters in place of the old ones, and return their digest.

        vLLM loads adapters from a directory only: here a temporary one, in memory where there is /dev/shm.
        """
        with tempfile.TemporaryDirectory(
            dir=_SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else None
        ) as path:
            digest: int | None = self._vllm.ask_workers("write_adapter", groups=groups, path=path)
            self._vllm.llm.add_lora(LoRARequest("policy", 1, path, load_inplace=True))
            self._in_force.adapter = LoRARequest("policy", 1, path)
        return digest

    def _check_paused(self, version: int) -> None:
        if (paused_for := self._in_force.paused_for) != version:
            raise RuntimeError(
                f"engine {self._vllm.name!r} is paused for version {paused_for}, not for {version}"
            )
