#!/usr/bin/env python
"""What the weights of a mixture of experts cost in Python, on their way into an engine: none of it depends on
the experts' width.

    python scripts/bench/expert_loading.py [--layers 48] [--experts 128] [--rounds 5] [--bucket-mib 256]

A real engine on the CPU, in this process, gets the weights of a Qwen3-MoE with narrow experts again and
again, in ways that take turns:

    one_by_one   each expert's matrices by vLLM's loader under the names of the checkpoint
    fused_names  two tensors for each layer, by the same loader, which takes them apart again
    stacked      as engines of this project load: the experts of a layer at once, one matrix after the other

Beside it what the trainer spends on cutting the same tensors and packing them into buckets, and an engine on
taking them out, as single experts and with a layer's experts in two tensors. Prints JSON: medians in seconds
of a processor, microseconds for each tensor of the experts, and ratios.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
# Before vLLM is imported: the engine is in this process, and may be handed a function.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR"}

import torch
from vllm import LLM
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from nemo_like.generation.expert_stacks import ExpertStacks, repack_experts
from nemo_like.models.family import FAMILIES
from nemo_like.policy.megatron.weight_conversion import Geometry, ModelPart, hf_tensors, single_experts
from nemo_like.weight_transport.buckets import from_lists, to_lists
from nemo_like.weight_transport.packing import Assembler, as_announced, pack, spec_of
from scripts.bench.arguments import at_least

CPU = torch.device("cpu")
# vLLM's kernels of CPUs pad narrower experts, and cannot load them a second time.
WIDTH = 32
HIDDEN, HEADS, KV_HEADS, HEAD, VOCABULARY = 64, 4, 2, 32, 64
Named = list[tuple[str, torch.Tensor]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=at_least(1), default=48)
    parser.add_argument("--experts", type=at_least(2), default=128)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--bucket-mib", type=at_least(1), default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    grouped = _grouped_experts(options.layers, options.experts)
    singles = list(_cut(grouped, options.experts))
    fused = _fused(grouped)
    found = {
        "expert_tensors": len(singles),
        "engine": _of_engine(options, singles, fused),
        "trainer": _of_trainer(options, grouped, singles, fused),
    }
    print(json.dumps(found, indent=2))
    return 0


def _grouped_experts(num_layers: int, num_experts: int) -> Named:
    """Return a trainer's experts, with all of a layer in one parameter, as Megatron-core's grouped ones."""
    torch.manual_seed(1)
    shapes = {1: (num_experts, 2 * WIDTH, HIDDEN), 2: (num_experts, HIDDEN, WIDTH)}
    return [
        (f"decoder.layers.{layer}.mlp.experts.weight{number}", torch.randn(shape).bfloat16())
        for layer in range(num_layers)
        for number, shape in shapes.items()
    ]


def _cut(grouped: Named, num_experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each expert's matrices under the names of the checkpoint, as a sender does."""
    part = ModelPart(
        family=FAMILIES.load("qwen3_moe"),
        tp_rank=0,
        tp_size=1,
        ep_rank=0,
        ep_size=1,
        etp_rank=0,
        etp_size=1,
        num_local_experts=num_experts,
    )
    geometry = Geometry(
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        head_size=HEAD,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
    )
    return hf_tensors(single_experts(grouped), geometry, part, lambda rule, tensor: [tensor])


def _fused(grouped: Named) -> Named:
    names = {"1": "gate_up_proj", "2": "down_proj"}
    return [
        (f"model.layers.{name.split('.')[2]}.mlp.experts.{names[name[-1]]}", tensor)
        for name, tensor in grouped
    ]


# The engine's side


def _of_engine(options: argparse.Namespace, singles: Named, fused: Named) -> dict[str, Any]:
    """Return what loading costs; the ways leave the same weights, else this raises."""
    with tempfile.TemporaryDirectory() as directory:
        engine = _engine(Path(directory), options.layers, options.experts)
        gc.collect()
        gc.freeze()  # as engines do: else the collector goes through all of vLLM again and again

        def measured(worker: Any) -> dict[str, list[float]]:
            ways = {"one_by_one": singles, "fused_names": fused, "stacked": singles}
            others = _other_weights(options.layers, options.experts)
            seconds: dict[str, list[float]] = {name: [] for name in ways}
            first: dict[str, torch.Tensor] = {}
            for _ in range(options.rounds):
                for name, tensors in ways.items():
                    seconds[name].append(_load(worker, name, [*others, *tensors]))
                    weights = {key: value.clone() for key, value in worker.get_model().state_dict().items()}
                    first = first or weights
                    if not all(torch.equal(value, first[key]) for key, value in weights.items()):
                        raise RuntimeError(f"{name} left other weights than one_by_one")
            return seconds

        [seconds] = engine.collective_rpc(measured)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        **{f"{name}_s": round(median, 4) for name, median in medians.items()},
        **{f"{name}_us_per_tensor": _micro(median, singles) for name, median in medians.items()},
        "one_by_one_over_stacked": round(medians["one_by_one"] / medians["stacked"], 2),
        "one_by_one_over_fused_names": round(medians["one_by_one"] / medians["fused_names"], 2),
    }


def _engine(path: Path, num_layers: int, num_experts: int) -> LLM:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": WIDTH,
        "num_hidden_layers": num_layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "num_experts": num_experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": WIDTH,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    return LLM(
        model=str(path),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        disable_log_stats=True,
    )


def _other_weights(num_layers: int, num_experts: int) -> Named:
    """Return the weights that no expert has, under the names of the checkpoint."""
    shapes = {
        "input_layernorm": (HIDDEN,),
        "post_attention_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD),
        "self_attn.q_norm": (HEAD,),
        "self_attn.k_norm": (HEAD,),
        "mlp.gate": (num_experts, HIDDEN),
    }
    names = {
        f"model.layers.{layer}.{name}": shape for layer in range(num_layers) for name, shape in shapes.items()
    }
    names |= {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    return [(f"{name}.weight", torch.randn(shape).bfloat16()) for name, shape in names.items()]


def _load(worker: Any, way: str, tensors: Named) -> float:
    """Load one version of the weights and return the seconds that took."""
    model = worker.get_model()
    started = time.process_time()
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        experts = ExpertStacks(model, CPU)
        model.load_weights(experts.take(tensors) if way == "stacked" else tensors)
        experts.loaded()
        finalize_layerwise_reload(model, worker.vllm_config.model_config)
    seconds = time.process_time() - started
    repack_experts(model)
    return seconds


# The trainer's side, and the bytes


def _of_trainer(options: argparse.Namespace, grouped: Named, singles: Named, fused: Named) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {}

    def timed(name: str, step: Callable[[], Any]) -> Any:
        started = time.process_time()
        result = step()
        seconds.setdefault(name, []).append(time.process_time() - started)
        return result

    buffer = torch.zeros(options.bucket_mib << 20, dtype=torch.uint8)
    for _ in range(options.rounds):
        timed("cut", lambda: list(_cut(grouped, options.experts)))
        for name, tensors in (("single", singles), ("fused", fused)):
            buckets = timed(f"pack_{name}", partial(_packed, tensors, buffer))
            timed(f"take_out_{name}", partial(_taken_out, buckets))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    single, apart = (medians[f"pack_{name}"] + medians[f"take_out_{name}"] for name in ("single", "fused"))
    return {
        **{f"{name}_s": round(median, 4) for name, median in medians.items()},
        **{
            f"{name}_us_per_tensor": _micro(medians[name], singles)
            for name in ("cut", "pack_single", "take_out_single")
        },
        "single_over_fused": round(single / apart, 2),
    }


def _packed(tensors: Named, buffer: torch.Tensor) -> list[tuple[bytes, torch.Tensor]]:
    """Return every bucket with the message that announces it, as a sender makes them."""
    announced = [spec_of(name, value) for name, value in tensors]
    values: Iterable[tuple[str, torch.Tensor]] = as_announced(tensors, announced)
    return [
        (json.dumps(to_lists(pieces)).encode(), bucket.clone())
        for pieces, bucket in pack(values, lambda _: buffer)
    ]


def _taken_out(buckets: list[tuple[bytes, torch.Tensor]]) -> int:
    assembler = Assembler(CPU)
    return sum(len(assembler.add(from_lists(json.loads(message)), bucket)) for message, bucket in buckets)


def _micro(seconds: float, tensors: Named) -> float:
    return round(seconds / len(tensors) * 1e6, 2)


if __name__ == "__main__":
    sys.exit(main())
