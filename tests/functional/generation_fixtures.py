"""Tiny Qwen3 checkpoints, engines, and a trainer stage that owns weights."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, Qwen3Config, Qwen3MoeConfig

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.batch.columns import Column
from nemo_like.cluster.actors import ActorHandle, ActorSpec, Concurrency
from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.generation.engine_spec import EngineAdapter, EngineSpec
from nemo_like.generation.environment import WAITING_METHODS, engine_environment, unused_by_engines
from nemo_like.generation.options import (
    GenerationConfig,
    KvCacheAfterUpdate,
    LoraSync,
    SamplingConfig,
    VllmConfig,
    WeightTransport,
)
from nemo_like.observability.metrics import Metric
from nemo_like.policy.options import Device, Precision
from nemo_like.tripwires.options import Tripwires
from nemo_like.weight_sync.sender import EngineWeightSender
from nemo_like.weight_transport.buckets import SentAdapter, TensorSpec

VOCAB_SIZE = 64
EOS = 1
MAX_LENGTH = 96
AS_IN_TRAINING = SamplingConfig(
    temperature=None,
    top_p=None,
    top_k=None,
    min_p=None,
    max_new_tokens=None,
    stop_strings=None,
    stop_token_ids=None,
    structured_outputs=None,
)
TIMEOUT_S = 240.0  # an engine starts in ten seconds, but not on a busy machine


def make_checkpoint(
    path: Path, *, tied: bool, num_experts: int = 0, expert_size: int = 32, num_layers: int = 2
) -> Path:
    """A random Qwen3 whose next-token distributions are far from uniform; no tokenizer. With experts, two of
    them are active for a token; on CPUs each worker of an engine needs 32 values of each, or a multiple."""
    torch.manual_seed(5)
    experts = {"num_experts": num_experts, "num_experts_per_tok": 2, "moe_intermediate_size": expert_size}
    config = (Qwen3MoeConfig if num_experts else Qwen3Config)(
        **(experts if num_experts else {}),
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def engine_kwargs(
    checkpoint: Path,
    name: str,
    *,
    tensor_parallel_size: int = 1,
    num_nodes: int = 1,
    max_num_seqs: int = 256,
    precision: Precision = Precision.float32,
    adapter: EngineAdapter | None = None,
    routed_experts: Column | None = None,
    kv_cache_gib: float = 0.0625,
    weight_updates: WeightUpdates | None = None,
    kv_cache_after_update: KvCacheAfterUpdate = KvCacheAfterUpdate.recompute,
    tokenizer_name: str | None = None,
    structured_outputs: bool = False,
    max_length: int = MAX_LENGTH,
    vllm_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of a ``VllmEngine`` on CPU."""
    generation = GenerationConfig(
        num_engines=1,
        max_new_tokens=16,
        temperature=1.0,
        top_p=1.0,
        top_k=None,
        min_p=0.0,
        stop_strings=[],
        stop_token_ids=[],
        structured_outputs={},
        validation=AS_IN_TRAINING,
        weight_transport=WeightTransport.auto,
        weight_bucket_mib=1,
        weight_delta=False,
        lora_sync=LoraSync.merged,
        kv_cache_after_update=kv_cache_after_update,
        vllm_cfg=VllmConfig(
            tensor_parallel_size=tensor_parallel_size,
            pipeline_parallel_size=1,
            num_nodes=num_nodes,
            enforce_eager=True,
            max_num_seqs=max_num_seqs,
            kv_cache_gib=kv_cache_gib,
            gpu_memory_utilization=0.5,
            quantization=None,
        ),
        vllm_kwargs=dict(vllm_kwargs or {}),
    )
    spec = EngineSpec(
        model_name=str(checkpoint),
        generation=generation,
        device=Device.cpu,
        precision=precision,
        adapter=adapter,
        routed_experts=routed_experts,
        weight_updates=weight_updates,
        tokenizer_name=tokenizer_name,
        structured_outputs=structured_outputs,
        max_total_sequence_length=max_length,
        seed=0,
    )
    return {"name": name, "spec": spec, "timeout_s": TIMEOUT_S}


def engine_spec(
    checkpoint: Path, name: str, target: str = "nemo_like.generation.vllm_engine:VllmEngine", **options: Any
) -> ActorSpec:
    """An engine that takes weights while samples are under way needs ``weight_updates``."""
    waits = options.get("weight_updates") is not None
    return ActorSpec(
        name=name,
        target=target,
        kwargs=engine_kwargs(checkpoint, name, **options),
        env=engine_environment(Device.cpu),
        concurrency=Concurrency.asyncio if waits else Concurrency.serial,
        in_threads=WAITING_METHODS if waits else (),
        without=unused_by_engines(Device.cpu),
    )


def collector_spec(name: str = "collector") -> ActorSpec:
    return ActorSpec(
        name=name,
        target="tests.functional.collector:Collector",
        concurrency=Concurrency.asyncio,
        env={"OMP_NUM_THREADS": "1"},
    )


def stage_spec(
    checkpoint: Path,
    name: str,
    stage: int,
    num_stages: int,
    transport: WeightTransport,
    kind: str = "TrainerStage",
    **options: Any,
) -> ActorSpec:
    return ActorSpec(
        name=f"{name}-{stage}",
        target=f"tests.functional.generation_fixtures:{kind}",
        kwargs={
            "checkpoint": str(checkpoint),
            "stage": stage,
            "num_stages": num_stages,
            "transport": transport,
            **options,
        },
        env=engine_environment(Device.cpu),
    )


def move_weights(model: torch.nn.Module, seed: int, size: float = 0.05) -> None:
    """Move every parameter that trains at random."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


class TrainerStage:
    """One pipeline stage of a trainer: the whole model is here, but only this stage's tensors are sent."""

    def __init__(
        self,
        *,
        checkpoint: str,
        stage: int,
        num_stages: int,
        transport: WeightTransport,
        sent_dtype: str = "float32",
        delta: bool = False,
    ) -> None:
        self._checkpoint, self._sent_dtype, self._delta = checkpoint, sent_dtype, delta
        self.reset()
        self._names = stage_names(self._state(), self._model.config, stage, num_stages)
        self._coordinates = ParallelLayout(tp=1, cp=1, dp=1, pp=num_stages).coordinates(stage)
        self._spoilt: str | None = None
        self._sender = self._sender_by(transport)

    def send_by(self, transport: WeightTransport, delta: bool = False) -> None:
        """Send by this transport from the next ``connect`` on: what changed, or everything."""
        self._sender.close()
        self._delta = delta
        self._sender = self._sender_by(transport)

    def _sender_by(self, transport: WeightTransport) -> EngineWeightSender:
        return EngineWeightSender(
            coordinates=self._coordinates,
            device=Device.cpu,
            transport=transport,
            bucket_mib=1,
            timeout_s=TIMEOUT_S,
            delta=self._delta,
            tripwires=Tripwires.all,
        )

    def reset(self) -> None:
        """Go back to the weights of the checkpoint."""
        self._model = AutoModelForCausalLM.from_pretrained(self._checkpoint, dtype=torch.float32).eval()

    def connect(self, engines: Sequence[ActorHandle]) -> None:
        state = self._state()
        self._sender.connect(
            engines, [TensorSpec(name, self._sent_dtype, tuple(state[name].shape)) for name in self._names]
        )

    def forget(self, name: str) -> None:
        """Leave a tensor out of everything announced and sent from now on."""
        self._names.remove(name)

    def spoil(self, name: str | None) -> None:
        """Send this tensor in another shape than announced from now on; None: none."""
        self._spoilt = name

    def update(self, seed: int, size: float = 0.05) -> None:
        """Move every parameter at random, the same way in every stage."""
        move_weights(self._model, seed, size)

    def push_weights(self, version: int) -> Mapping[str, Metric]:
        return self._sender.send(version, self._weights())

    def logprobs(self, prompt_ids: Sequence[int], responses: Sequence[np.ndarray]) -> list[np.ndarray]:
        return [reference_logprobs(self._model, prompt_ids, response) for response in responses]

    def _state(self) -> dict[str, torch.Tensor]:
        """Tensors as a checkpoint names them, which in memory may be stacked."""
        with tempfile.TemporaryDirectory() as directory:
            self._model.save_pretrained(directory)
            return load_file(Path(directory) / "model.safetensors")

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        state = self._state()
        for name in self._names:
            value = state[name].to(getattr(torch, self._sent_dtype))
            yield name, value[:1] if name == self._spoilt else value


def stage_names(
    state: Mapping[str, torch.Tensor], config: PreTrainedConfig, stage: int, num_stages: int
) -> list[str]:
    """Hugging Face names a stage holds: embedding on the first, final norm and output layer on the last."""
    num_layers = config.num_hidden_layers
    names = []
    for name in state:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".layers." in name:
            owner = int(name.split(".layers.")[1].split(".")[0]) * num_stages // num_layers
        else:
            owner = 0 if "embed_tokens" in name else num_stages - 1
        if owner == stage:
            names.append(name)
    return names


class AdapterStage:
    """One pipeline stage of a trainer of peft's adapters, which sends these alone or a model with them merged
    into it."""

    def __init__(
        self, *, checkpoint: str, stage: int, num_stages: int, transport: WeightTransport, targets: list[str]
    ) -> None:
        base = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets)
        torch.manual_seed(0)  # the adapters are alike in every stage
        self._model = get_peft_model(base, config).eval()
        self._names = [
            name
            for name in get_peft_model_state_dict(self._model)
            if int(name.split(".layers.")[1].split(".")[0]) * num_stages // base.config.num_hidden_layers
            == stage
        ]
        self._sender = EngineWeightSender(
            coordinates=ParallelLayout(tp=1, cp=1, dp=1, pp=num_stages).coordinates(stage),
            device=Device.cpu,
            transport=transport,
            bucket_mib=1,
            timeout_s=TIMEOUT_S,
            tripwires=Tripwires.all,
        )

    def connect(self, engines: Sequence[ActorHandle]) -> None:
        state = get_peft_model_state_dict(self._model)
        specs = [TensorSpec(name, "float32", tuple(state[name].shape)) for name in self._names]
        config = json.loads(json.dumps(self._model.peft_config["default"].to_dict(), default=sorted))
        base_bytes = sum(parameter.nbytes for parameter in self._model.parameters())
        self._sender.connect(engines, specs, SentAdapter(config, base_bytes))

    def update(self, seed: int, size: float = 0.05) -> None:
        """Move every adapter at random, the same way in every stage."""
        move_weights(self._model, seed, size)

    def push_weights(self, version: int) -> Mapping[str, Metric]:
        state = get_peft_model_state_dict(self._model)
        return self._sender.send(version, ((name, state[name]) for name in self._names))

    def logprobs(self, prompt_ids: Sequence[int], responses: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Those of the model with the adapters merged into its weights."""
        merged = copy.deepcopy(self._model).merge_and_unload()
        return [reference_logprobs(merged, prompt_ids, response) for response in responses]


def reference_logprobs(
    model: torch.nn.Module, prompt_ids: Sequence[int], token_ids: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """[L] float32, nats: what Hugging Face says of a response, one forward pass."""
    ids = torch.tensor([[*prompt_ids, *token_ids.tolist()]])
    with torch.no_grad():
        logprobs = (model(ids).logits[0].float() / temperature).log_softmax(-1)
    positions = torch.arange(len(prompt_ids) - 1, ids.shape[1] - 1)
    return logprobs[positions, ids[0, len(prompt_ids) :]].numpy()
