"""Starts vLLM's engine; ``StartedVllm`` is what the parts of a ``VllmEngine`` share."""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm import EngineArgs, LLMEngine
from vllm.lora.request import LoRARequest

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.batch.tags import AS_LOADED
from nemo_like.cluster.janitor import MARK
from nemo_like.cluster.placement import node_address
from nemo_like.cluster.stage import EngineHolds
from nemo_like.compat.gloo import one_gloo_device
from nemo_like.compat.shared_names import remove_names, track_names
from nemo_like.compat.without_torchvision import lacks_torchvision, patch_vllm
from nemo_like.compat.worker_calls import call_workers
from nemo_like.generation.engine_args import engine_args
from nemo_like.generation.engine_routes import EngineRoutes
from nemo_like.generation.engine_spec import EngineNode, EngineSpec
from nemo_like.generation.engine_thread import end_process
from nemo_like.generation.options import KvCacheAfterUpdate
from nemo_like.generation.sleep import EngineMemory, has_sleep_mode
from nemo_like.generation.speculation import speculation
from nemo_like.models.model_info import has_vision_tower
from nemo_like.policy.options import Device

# The number of net allocations after which Python collects the youngest generation.
_GC_THRESHOLD = 50_000


@dataclass(slots=True)
class WeightsInForce:
    """The weights that an engine samples with."""

    policy_version: int = AS_LOADED
    digest: int | None = None  # of the weights as they arrived; None without tripwires
    # With this, vLLM computes a request with the adapter; None where there is no adapter.
    adapter: LoRARequest | None = None
    num_loads: int = 0
    paused_for: int | None = None  # the version for which no step runs; None: steps run


@dataclass(frozen=True, slots=True)
class StartedVllm:
    """vLLM's engine in this process, as ``spec`` asks for it. Only the engine's step thread calls ``llm``."""

    name: str
    spec: EngineSpec
    llm: LLMEngine
    routes: EngineRoutes
    memory: EngineMemory
    added_tokens: Mapping[str, int]  # ids of the tokens that the tokenizer never splits, by text
    weights: WeightsInForce = field(default_factory=WeightsInForce)

    @property
    def keeps_kv_cache(self) -> bool:
        """Whether samples under way go on with keys and values of earlier weights."""
        return (
            self.spec.weight_updates is WeightUpdates.in_flight
            and self.spec.generation.kv_cache_after_update is KvCacheAfterUpdate.keep
        )

    def check_awake(self) -> None:
        """Raise RuntimeError unless the engine holds its weights and its KV cache."""
        if self.memory.holds is not EngineHolds.everything:
            raise RuntimeError(f"engine {self.name!r} sleeps, so it cannot generate")

    def ask_workers(self, method: str, **kwargs: Any) -> Any:
        """Call every worker of this engine, and return the first one's answer."""
        return call_workers(self.llm, method, kwargs)


def _meet(args: EngineArgs, spec: EngineSpec, node: EngineNode) -> None:
    """Have the engine's workers on this node meet the workers on its other nodes."""
    args.nnodes, args.node_rank = spec.generation.vllm_cfg.num_nodes, node.rank
    args.master_addr, args.master_port = node.address, node.port
    os.environ["VLLM_HOST_IP"] = node_address()  # vLLM would ask the network for its own address


def complete_args(
    name: str, spec: EngineSpec, routes: EngineRoutes, node: EngineNode | None = None
) -> EngineArgs:
    """Return ``engine_args`` completed by the arguments that routes, sleep, weight updates, structured
    outputs and several nodes need. Raises ValueError when the engine should sleep but cannot."""
    args = engine_args(spec)
    if node is not None:
        _meet(args, spec, node)
    if spec.generation.vllm_cfg.num_workers > 1:
        track_names(unset=MARK)
    routes.configure(args)
    args.enable_sleep_mode = has_sleep_mode(name, spec.sleeps, spec.device)
    # CUDA graphs, where there are any, leave the GPU too.
    args.sleep_mode_offload_cudagraph = args.enable_sleep_mode
    if spec.weight_updates is not None:
        # A step that is computed ahead would belong to two versions, and depend on the machine's speed.
        args.async_scheduling = False
    if spec.structured_outputs:
        # No optional spaces: a policy that is bad at JSON would fill its response with them.
        args.structured_outputs_config.disable_any_whitespace = True
        args.structured_outputs_config.backend = "xgrammar"
    # To process images vLLM needs a tokenizer.
    tokenizer_name = spec.model_name if has_vision_tower(spec.model_name) else spec.tokenizer_name
    if tokenizer_name is not None:
        args.tokenizer = tokenizer_name
        args.skip_tokenizer_init = False
    return args


def build_llm_engine(spec: EngineSpec, args: EngineArgs) -> LLMEngine:
    """Build vLLM's engine. Raises vLLM's own errors."""
    if has_vision_tower(spec.model_name) and lacks_torchvision():
        patch_vllm()
    with one_gloo_device():
        return LLMEngine.from_engine_args(args)


def prepare_engine(name: str, spec: EngineSpec, llm: LLMEngine, routes: EngineRoutes) -> StartedVllm:
    """Prepare vLLM's engine and its workers as ``spec`` asks. Raises GenerationError when the model has
    another number of layers with experts than the run's column."""
    llm.set_weight_version(str(AS_LOADED))
    has_tokenizer = not llm.model_config.skip_tokenizer_init
    if spec.structured_outputs:
        call_workers(llm, "return_unmasked_logprobs", {})
    if spec.device is Device.cpu and speculation(spec.generation) is not None:
        call_workers(llm, "mend_draft_sampling", {})
    if spec.device is Device.cpu and spec.generation.vllm_cfg.pipeline_parallel_size > 1:
        call_workers(llm, "make_stage_buffers", {})
    routes.start(llm)
    started = StartedVllm(
        name=name,
        spec=spec,
        llm=llm,
        routes=routes,
        memory=EngineMemory(llm, spec.sleeps),
        added_tokens=llm.get_tokenizer().get_added_vocab() if has_tokenizer else {},
    )
    if multiprocessing.active_children():
        llm.model_executor.register_failure_callback(end_process)
        remove_names()
    # The objects of the start are never garbage, so no collection need look at them. A batch allocates
    # so many small objects that collections at Python's default rate take a twentieth of its time.
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    return started
