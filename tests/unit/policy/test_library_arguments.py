from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer.transformer_config import TransformerConfig
from vllm import EngineArgs
from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod

from nemo_like.config import fields
from nemo_like.configuration import Config
from nemo_like.generation import engine_args
from nemo_like.generation.draft_rules import REFUSED
from nemo_like.generation.speculation import DraftMethod
from nemo_like.plan.memory_timetable import GIB, memory_problems
from nemo_like.policy.backends.library_arguments import (
    KEYS,
    RELIED_ON,
    Library,
    engine_argument_problems,
    passed_to_workers,
    worker_argument_problems,
)
from nemo_like.policy.megatron import model as megatron_model
from nemo_like.policy.megatron import optimizer as megatron_optimizer
from nemo_like.rules.update_rules import update_problems
from tests.unit.plan.test_memory_timetable import qwen3_8b

Demo = Callable[..., Config]
DATACLASSES = {
    Library.vllm: EngineArgs,
    Library.megatron_model: TransformerConfig,
    Library.megatron_optimizer: OptimizerConfig,
}
SOURCES = {
    Library.vllm: engine_args,
    Library.megatron_model: megatron_model,
    Library.megatron_optimizer: megatron_optimizer,
}
# What is set here, and may be set otherwise.
DEFAULTS = {
    Library.vllm: {"max_num_batched_tokens", "enable_prefix_caching", "block_size"},
    Library.megatron_model: {
        *("moe_token_dispatcher_type", "recompute_granularity", "recompute_method", "recompute_num_layers")
    },
    Library.megatron_optimizer: {"use_precision_aware_optimizer"},
}


def problems(cfg: Config) -> list[str]:
    of_engines = engine_argument_problems(cfg.generation, cfg.grpo)
    return [str(problem) for problem in (*of_engines, *worker_argument_problems("policy", cfg.policy))]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("generation.vllm_kwargs={seed: 3}", "generation.vllm_kwargs.seed=3 is set by grpo.seed; set"),
        (
            "generation.vllm_kwargs={data_parallel_size: 2}",
            "generation.vllm_kwargs.data_parallel_size=2 is, for a dense model, the same as more engines, "
            "and cannot be kept in step with weight updates for a mixture of experts; set "
            "generation.num_engines",
        ),
        (
            "generation.vllm_kwargs={trust_remote_code: true}",
            "generation.vllm_kwargs.trust_remote_code=True is set by policy.trust_remote_code; set",
        ),
        (
            "generation.vllm_kwargs={nnodes: 2}",
            "generation.vllm_kwargs.nnodes=2 is set by generation.vllm_cfg.num_nodes; set",
        ),
        (
            "generation.vllm_kwargs={logprobs_mode: raw_logits}",
            "generation.vllm_kwargs.logprobs_mode=raw_logits would change the log-probs, which must be those "
            "of what was sampled from; leave it out",
        ),
        (
            "policy.megatron_cfg.model_kwargs={hidden_dropout: 0.1}",
            "policy.megatron_cfg.model_kwargs.hidden_dropout=0.1 must be 0, so that the policy that trains "
            "is the one that sampled; leave it out",
        ),
        (
            "policy.megatron_cfg.model_kwargs={moe_token_dispatcher_type: allgather}",
            "policy.megatron_cfg.model_kwargs.moe_token_dispatcher_type=allgather does not take "
            "micro-batches of different lengths; use alltoall or flex",
        ),
        (
            "policy.megatron_cfg.optimizer_kwargs={lr: 0.1}",
            "policy.megatron_cfg.optimizer_kwargs.lr=0.1 is set by policy.optimizer.lr; set",
        ),
    ],
)
def test_an_argument_that_is_set_or_relied_on_here_is_refused_with_the_reason(
    demo: Demo, override: str, problem: str
) -> None:
    (told,) = problems(demo(override))
    assert told.startswith(problem)


def test_other_arguments_pass(demo: Demo) -> None:
    cfg = demo(
        "generation.vllm_kwargs={max_num_batched_tokens: 4096, compilation_config: {level: 0}}",
        "policy.megatron_cfg.model_kwargs={recompute_granularity: selective, moe_router_dtype: fp32}",
        "policy.megatron_cfg.optimizer_kwargs={decoupled_weight_decay: false}",
    )
    assert problems(cfg) == []
    assert cfg.generation.vllm_kwargs == {"max_num_batched_tokens": 4096, "compilation_config": {"level": 0}}


def test_what_depends_on_other_keys_is_refused_beside_these(demo: Demo) -> None:
    recomputed = "policy.megatron_cfg.model_kwargs={recompute_granularity: selective}"
    (told,) = problems(demo(recomputed, "policy.megatron_cfg.activation_checkpointing=true"))
    assert "is set by policy.megatron_cfg.activation_checkpointing=true; set that to false" in told
    attention = ("policy.backend=fsdp", "policy.fsdp_cfg.model_kwargs={attn_implementation: eager}")
    assert problems(demo(*attention, "policy.sequence_packing.enabled=false")) == []
    packed = ("policy.sequence_packing.enabled=true", "policy.dynamic_batching.enabled=false")
    (told,) = problems(demo(*attention, *packed))
    assert "is set by policy.sequence_packing.enabled=true" in told


def test_arguments_of_the_other_backend_are_refused(demo: Demo) -> None:
    cfg = demo("policy.backend=fsdp", "policy.megatron_cfg.model_kwargs={moe_router_dtype: fp32}")
    assert passed_to_workers("policy", cfg.policy) == []


@pytest.mark.parametrize("library", DATACLASSES)
def test_the_installed_library_has_every_argument_that_is_refused(library: Library) -> None:
    known = {field.name for field in dataclasses.fields(DATACLASSES[library])}
    assert {*KEYS[library], *RELIED_ON[library]} <= known
    assert not KEYS[library].keys() & RELIED_ON[library].keys()


@pytest.mark.parametrize("key", sorted({key for keys in KEYS.values() for key in keys.values()}))
def test_the_keys_that_are_named_exist(key: str) -> None:
    assert fields.find(Config, key.format(group="policy")) is not None


def set_in(library: Library) -> Iterator[str]:
    """Names of the library's arguments that the module which fills its dataclass sets: as keywords, and as
    keys of dictionaries."""
    known = {field.name for field in dataclasses.fields(DATACLASSES[library])}
    for node in ast.walk(ast.parse(inspect.getsource(SOURCES[library]))):
        if isinstance(node, ast.keyword) and node.arg in known:
            yield str(node.arg)
        if isinstance(node, ast.Constant) and node.value in known:
            yield str(node.value)


@pytest.mark.parametrize("library", DATACLASSES)
def test_everything_that_is_set_here_is_refused_or_may_be_set_otherwise(library: Library) -> None:
    found = set(set_in(library))
    assert len(found) >= 10
    assert found - DEFAULTS[library] <= {*KEYS[library], *RELIED_ON[library]}


def test_keys_and_values_in_eight_bits_need_a_correction_and_take_half(demo: Demo) -> None:
    eight_bits = "generation.vllm_kwargs={kv_cache_dtype: fp8}"
    plain = "loss_fn.use_generation_logprobs_as_prev=false"
    cfg = demo(eight_bits, plain)
    (told,) = [str(problem) for problem in update_problems(cfg) if "kv_cache" in problem.key]
    assert "kv_cache_dtype=fp8 samples from another policy than trains" in told
    corrected = demo(eight_bits, plain, "loss_fn.use_importance_sampling_correction=true")
    assert not [problem for problem in update_problems(corrected) if "kv_cache" in problem.key]
    assert not list(update_problems(demo("generation.vllm_kwargs={kv_cache_dtype: bfloat16}", plain)))
    share = "generation.vllm_cfg.gpu_memory_utilization=0.15"
    needed = [
        next(str(problem) for problem in memory_problems(*qwen3_8b(share, *more), 79 * GIB)).rpartition(
            "need "
        )[2]
        for more in ([], [eight_bits], ["generation.vllm_kwargs={max_num_batched_tokens: 65536}"])
    ]
    # 15.26 of weights and 4,096 tokens of 144 KiB; half of these; 65,536 tokens of 160 KiB besides.
    assert [text.partition(" GiB")[0] for text in needed] == ["15.8", "15.5", "25.8"]


def test_vllm_has_every_method_of_drafting_and_every_argument_that_is_refused() -> None:
    assert {method.value for method in DraftMethod} <= set(get_args_of(SpeculativeMethod))
    of_drafts = {field.name: field for field in dataclasses.fields(SpeculativeConfig)}
    assert of_drafts.keys() >= REFUSED.keys()
    # What is passed without being refused is what vLLM does by itself.
    assert all(of_drafts[name].default in neutral for name, (neutral, _) in REFUSED.items())


def get_args_of(literal: Any) -> Iterator[str]:
    """The values of nested literals."""
    for one in get_args(literal):
        yield from [one] if isinstance(one, str) else get_args_of(one)


def test_what_a_group_that_does_not_train_has_no_key_for_is_refused_as_that(demo: Demo) -> None:
    arguments = "teacher.megatron_cfg.model_kwargs={moe_enable_routing_replay: true, bf16: true}"
    cfg = demo("teacher=default", "teacher.model_name=here", arguments)
    assert cfg.teacher is not None
    replay, precision = map(str, worker_argument_problems("teacher", cfg.teacher))
    assert "moe_enable_routing_replay=True is for training, and the group teacher does not train" in replay
    assert "bf16=True is set by teacher.precision" in precision
