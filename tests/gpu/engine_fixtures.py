"""Engines, and a trainer in another process on the same GPU. On the CPU the same, but for sleep."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from nemo_like.cluster.actors import ActorHandle, ActorSpec
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.cluster.stage import EngineHolds
from nemo_like.generation.engine_spec import Sleeps
from nemo_like.generation.environment import engine_environment, unused_by_engines
from nemo_like.generation.interface import GroupRequest
from nemo_like.generation.options import WeightTransport
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.observability.metrics import Metric
from nemo_like.policy.options import Device, Precision
from nemo_like.tripwires.canary_checks import canary_tokens
from nemo_like.tripwires.options import Tripwires
from nemo_like.weight_sync.sender import EngineWeightSender
from nemo_like.weight_transport.buckets import TensorSpec
from tests.functional.generation_fixtures import (
    TIMEOUT_S,
    VOCAB_SIZE,
    collector_spec,
    engine_spec,
)

# Of each engine, in its GPU's memory.
ENGINE_SHARE = 0.15
CANARY = canary_tokens(VOCAB_SIZE, 64)
GREEDY = SamplingSettings(0.0, 1.0, 0, 16, ())


def on_device(device: Device) -> dict[str, str]:
    """The environment of a process on the first GPU, or on none."""
    if device is Device.cpu:
        return {"OMP_NUM_THREADS": "1"}
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    return {"CUDA_VISIBLE_DEVICES": first, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


def bf16_engine_spec(
    checkpoint: Path, name: str, device: Device, sleeps: Sleeps = Sleeps.keeping_weights, **options: Any
) -> ActorSpec:
    """An engine in bfloat16, which on a GPU uses CUDA graphs, as users' do, and can sleep."""
    spec = engine_spec(checkpoint, name, precision=Precision.bfloat16, **options)
    if device is Device.cpu:
        return spec
    on_cpu: Any = spec.kwargs["spec"]
    vllm = replace(
        on_cpu.generation.vllm_cfg,
        enforce_eager=False,
        kv_cache_gib=None,
        gpu_memory_utilization=ENGINE_SHARE,
    )
    generation = replace(on_cpu.generation, vllm_cfg=vllm)
    kwargs = {**spec.kwargs, "spec": replace(on_cpu, device=device, generation=generation, sleeps=sleeps)}
    env = {**engine_environment(device), **on_device(device)}
    return replace(spec, kwargs=kwargs, env=env, without=unused_by_engines(device))


def trainer_spec(checkpoint: Path, name: str, device: Device) -> ActorSpec:
    return ActorSpec(
        name=name,
        target="tests.gpu.engine_fixtures:Trainer",
        kwargs={"checkpoint": str(checkpoint), "device": device},
        env=on_device(device),
    )


class Trainer:
    """Holds a model in bfloat16 and sends it whole: through the GPU's memory, or shared memory."""

    def __init__(self, *, checkpoint: str, device: Device) -> None:
        model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
        self._model = model.to(device.value).eval()
        transport = WeightTransport.cuda_ipc if device is Device.cuda else WeightTransport.shared_memory
        self._sender = EngineWeightSender(
            coordinates=ParallelLayout(tp=1, cp=1, dp=1, pp=1).coordinates(0),
            device=device,
            transport=transport,
            bucket_mib=1,
            timeout_s=TIMEOUT_S,
            tripwires=Tripwires.all,
        )

    def connect(self, engines: Sequence[ActorHandle]) -> None:
        specs = [
            TensorSpec(name, "bfloat16", tuple(weight.shape))
            for name, weight in self._model.named_parameters()
        ]
        self._sender.connect(engines, specs)

    def update(self, seed: int) -> None:
        """Move every parameter at random."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator).to(parameter))

    def push_weights(self, version: int) -> Mapping[str, Metric]:
        weights = ((name, weight.detach()) for name, weight in self._model.named_parameters())
        return self._sender.send(version, weights)

    def save(self, path: str) -> None:
        """Write a checkpoint of what ``push_weights`` sends."""
        self._model.save_pretrained(path)

    def canary_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of all tokens but the first, by a forward pass of the weights here."""
        ids = torch.tensor([token_ids], device=self._model.device)
        with torch.no_grad():
            logprobs = self._model(ids).logits[0, :-1].float().log_softmax(-1)
        return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()


@dataclass
class World:
    """Engines and a trainer, connected, and a sink."""

    cluster: Cluster
    engines: list[ActorHandle]
    trainer: ActorHandle
    sink: ActorHandle
    num_requests: int = 0
    version: int = -1  # that was sent last; engines refuse an older one

    def ask(self, actor: ActorHandle, method: str, *args: object) -> Any:
        return self.cluster.gather([actor.submit(method, *args)], stage="test", timeout_s=TIMEOUT_S)[0]

    def push_weights(self) -> Mapping[str, Metric]:
        """Send the trainer's weights to all engines, as the next version."""
        self.version += 1
        return self.ask(self.trainer, "push_weights", self.version)

    def hold(self, what: EngineHolds, engine: int = 0) -> None:
        self.ask(self.engines[engine], "hold", what)

    def canary(self, engine: int = 0) -> list[float]:
        return self.ask(self.engines[engine], "canary_logprobs", CANARY)

    @contextmanager
    def fresh_engine(self, checkpoint: Path, device: Device) -> Iterator[int]:
        """Have one more engine within the block, of a checkpoint's weights; give its number. On a GPU the
        others must sleep."""
        handle = self.cluster.start(bf16_engine_spec(checkpoint, "fresh", device))
        self.engines.append(handle)
        try:
            self.ask(handle, "stats")
            yield len(self.engines) - 1
        finally:
            self.engines.pop()
            self.cluster.discard(handle)

    def trainers_canary(self) -> list[float]:
        return self.ask(self.trainer, "canary_logprobs", CANARY)

    def generate(self, engine: int = 0) -> list[int]:
        """The token ids of a greedy response."""
        self.num_requests += 1
        request = GroupRequest(f"request-{self.num_requests}", CANARY[:8], (0,))
        self.ask(self.engines[engine], "submit", [request], GREEDY, self.sink)
        [result] = self.ask(self.sink, "wait_for", [request.request_id], TIMEOUT_S)
        return result.responses[0].token_ids.tolist()


def start_world(checkpoint: Path, device: Device, num_engines: int) -> World:
    """Start the engines one after the other; on a GPU each sleeps before the next one starts. All but the
    first lose their weights while they sleep."""
    cluster = Cluster()
    engines = []
    try:
        for index in range(num_engines):
            sleeps = Sleeps.losing_weights if index else Sleeps.keeping_weights
            engine = cluster.start(bf16_engine_spec(checkpoint, f"engine-{index}", device, sleeps))
            calls = [engine.submit("stats")]
            if device is Device.cuda:
                calls.append(engine.submit("hold", EngineHolds.nothing))
            cluster.gather(calls, stage="start", timeout_s=TIMEOUT_S)
            engines.append(engine)
        trainer = cluster.start(trainer_spec(checkpoint, "trainer", device))
        world = World(cluster, engines, trainer, cluster.start(collector_spec()))
        world.ask(trainer, "connect", engines)
    except BaseException:
        cluster.stop()
        raise
    return world
