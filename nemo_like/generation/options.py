"""The keys of the engines and of sampling, ``generation``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any

from nemo_like.config.keys import Key

# vLLM refuses requests above it.
MAX_TEMPERATURE = 2.0


class WeightTransport(Enum):
    """How weights get from the policy workers to the engines."""

    auto = "auto"  # shared_memory on CPU on one node, cuda_ipc on GPUs if colocated, otherwise collective
    shared_memory = "shared_memory"  # CPU, one node: sender and engines map the same host memory
    cuda_ipc = "cuda_ipc"  # GPU, one node: sender and engines map memory of the sender's GPU
    collective = "collective"  # a broadcast over gloo or NCCL, with one process group per pipeline stage


class KvCacheAfterUpdate(Enum):
    """The keys and values that samples under way have when they go on with new weights."""

    recompute = "recompute"  # computed anew, by the new weights
    keep = "keep"  # those that they have, of the old weights


class Quantization(Enum):
    fp8 = "fp8"  # linear layers in 8 bits: a scale per output channel, and one per token


class LoraSync(Enum):
    """What reaches the engines when low-rank adapters are trained."""

    merged = "merged"  # the whole model, with the adapters merged into it
    adapter = "adapter"  # the adapters alone; the engines compute them beside the checkpoint's weights


@dataclass(kw_only=True, slots=True)
class VllmConfig:
    tensor_parallel_size: Annotated[int, Key("of each engine", 1, at_least=1)]
    pipeline_parallel_size: Annotated[
        int, Key("stages of each engine, each of which holds some of the layers", 1, at_least=1)
    ]
    num_nodes: Annotated[
        int, Key("nodes over which the processes of each engine are spread, in equal shares", 1, at_least=1)
    ]
    enforce_eager: Annotated[bool, Key("no CUDA graphs and no compilation", True)]
    max_num_seqs: Annotated[int, Key("sequences that one engine decodes together", 256, at_least=1)]
    kv_cache_gib: Annotated[
        float | None, Key("size of one engine's KV cache on CPU; on GPU null", 1.0, above=0)
    ]
    gpu_memory_utilization: Annotated[
        float, Key("share of a GPU's memory that one engine takes; unused on CPU", 0.8, above=0, at_most=1)
    ]
    quantization: Annotated[
        Quantization | None,
        Key(
            "null, or fp8 on GPUs: linear layers sample in 8 bits, training stays in "
            "policy.precision. The policy that samples is then another one: "
            "loss_fn.use_importance_sampling_correction or use_generation_logprobs_as_prev "
            "corrects that.",
            None,
        ),
    ]

    @property
    def num_workers(self) -> int:
        """Processes, and on GPUs also devices, of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def workers_per_node(self) -> int:
        """Processes, and on GPUs also devices, of one engine on each of its nodes."""
        return self.num_workers // max(1, self.num_nodes)


@dataclass(kw_only=True, slots=True)
class SamplingConfig:
    """Sampling settings that replace the more general ones named where this is used; null: no change."""

    temperature: Annotated[float | None, Key("0 is greedy", None)]
    top_p: Annotated[float | None, Key("share of the probability that is sampled from", None)]
    top_k: Annotated[int | None, Key("0: all tokens", None)]
    min_p: Annotated[
        float | None, Key("tokens below this share of the largest probability are not sampled", None)
    ]
    max_new_tokens: Annotated[int | None, Key("per turn", None)]
    stop_strings: Annotated[
        list[str] | None, Key("a response also ends at the first of these, which stays in it", None)
    ]
    stop_token_ids: Annotated[
        list[int] | None, Key("a response also ends with one of these, which is no part of its text", None)
    ]
    structured_outputs: Annotated[
        dict[str, Any] | None, Key("the grammar that every response follows; {}: none", None)
    ]


@dataclass(kw_only=True, slots=True)
class GenerationConfig:
    """Sampling of responses by vLLM."""

    num_engines: Annotated[
        int, Key("independent engines; prompts are dealt to them round robin", 1, at_least=1)
    ]
    max_new_tokens: Annotated[int, Key("of a response; of one turn where there are several", 512, at_least=1)]
    temperature: Annotated[
        float,
        Key(
            "the trainer's log-probs use the same",
            1.0,
            above=0,
            at_most=MAX_TEMPERATURE,
            remedy="training samples must vary; use generation.validation.temperature=0 for greedy "
            "validation",
        ),
    ]
    top_p: Annotated[
        float,
        Key("training needs 1.0, since the trainer's log-probs are those of the full distribution", 1.0),
    ]
    top_k: Annotated[int | None, Key("null: all tokens, which training needs", None)]
    min_p: Annotated[float, Key("training needs 0.0", 0.0)]
    stop_strings: Annotated[
        list[str],
        Key(
            "a response also ends at the first of these, which stays in it and may be a special token's text",
            [],
        ),
    ]
    stop_token_ids: Annotated[
        list[int],
        Key(
            "A response ends with any token that the checkpoint's generation_config.json, "
            "config.json or tokenizer names as eos, and with these; none of them is part of "
            "its text.",
            [],
        ),
    ]
    structured_outputs: Annotated[
        dict[str, Any],
        Key(
            "a grammar that every response follows: {regex: TEXT}, {json: SCHEMA}, {choice: [TEXT]} or "
            "{grammar: EBNF}; tokens that it forces do not train",
            {},
        ),
    ]
    validation: Annotated[
        SamplingConfig, Key("settings that replace those above in validation; null: as above")
    ]
    weight_transport: Annotated[
        WeightTransport,
        Key(
            "How weights get from the policy workers to the engines: auto, shared_memory "
            "(CPU, one node), cuda_ipc (GPU, one node) or collective (gloo, NCCL).",
            WeightTransport.auto,
        ),
    ]
    weight_bucket_mib: Annotated[
        int,
        Key(
            "cuda_ipc and collective send weights in buckets of this size; shared_memory has none",
            64,
            at_least=1,
        ),
    ]
    weight_delta: Annotated[
        bool,
        Key(
            "after a first time, send only the values that changed; costs a copy on both sides' hosts", False
        ),
    ]
    lora_sync: Annotated[
        LoraSync,
        Key(
            "with policy.lora, engines get the merged weights; adapter: they get the adapters alone",
            LoraSync.merged,
        ),
    ]
    kv_cache_after_update: Annotated[
        KvCacheAfterUpdate,
        Key(
            "With grpo.weight_updates=in_flight, the keys and values of samples that go on "
            "with new weights: recompute computes them anew by the new weights; keep goes on "
            "with those of the old weights, which costs nothing.",
            KvCacheAfterUpdate.recompute,
        ),
    ]
    vllm_cfg: Annotated[VllmConfig, Key("of each vLLM engine")]
    vllm_kwargs: Annotated[
        dict[str, Any],
        Key(
            "Further arguments of vLLM's EngineArgs, passed on as they are: kv_cache_dtype, "
            "speculative_config, ...",
            {},
        ),
    ]
