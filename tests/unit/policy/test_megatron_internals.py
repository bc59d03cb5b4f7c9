"""Megatron-core still looks where this project puts its own: elsewhere a replacement would do nothing."""

from __future__ import annotations

import ast
import inspect
import logging
import textwrap
from types import ModuleType

import pytest
import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer_config
from megatron.core.optimizer import optimizer as mixed_precision
from megatron.core.pipeline_parallel import schedules
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.router_replay import RouterReplay

from nemo_like.compat.cpu_shim import _CPU, _CudaMeansCpu, _is_not_rng_notice, plain_torch

REPLACED = [
    (clip_grads, "l2_norm_impl"),
    (clip_grads, "multi_tensor_scale_impl"),
    (distrib_optimizer, "Adam"),
    (distrib_optimizer, "HAVE_APEX_OR_TE"),
    (distrib_optimizer, "USING_APEX_OPTIMIZER"),
    (megatron_optimizer, "Adam"),
    (megatron_optimizer, "USING_PYTORCH_OPTIMIZER"),
    (megatron_random, "_get_cuda_rng_state"),
    (megatron_random, "_set_cuda_rng_state"),
    (mixed_precision, "multi_tensor_scale_impl"),
    (moe_utils, "te_general_gemm"),
    (optimizer_config, "is_te_min_version"),
    (schedules, "custom_backward"),
    (token_dispatcher, "maybe_move_tensor_to_cpu"),
]


def names_that_functions_read(module: ModuleType) -> set[str]:
    functions = [
        one for one in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(one, ast.FunctionDef)
    ]
    return {
        node.id
        for function in functions
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


@pytest.mark.parametrize(("module", "name"), REPLACED, ids=lambda one: getattr(one, "__name__", one))
def test_a_name_that_is_replaced_is_read_when_it_is_used(module: ModuleType, name: str) -> None:
    assert name in names_that_functions_read(module)


def test_a_model_is_made_of_the_steps_that_are_replaced() -> None:
    forward = ast.parse(textwrap.dedent(inspect.getsource(GPTModel.forward)))
    called = {
        node.func.attr: {keyword.arg for keyword in node.keywords}
        for node in ast.walk(forward)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert {"input_ids", "position_ids", "packed_seq_params"} <= called["_preprocess"]
    assert {"hidden_states", "labels"} <= called["_postprocess"]


def test_a_router_asks_its_replay_which_experts_to_take() -> None:
    routing = inspect.getsource(TopKRouter.routing)
    assert "router_replay=self.router_replay" in routing
    choosing = inspect.getsource(moe_utils.topk_routing_with_score_function)
    assert "router_replay.get_replay_topk(" in choosing
    asked = list(inspect.signature(RouterReplay.get_replay_topk).parameters)
    assert asked == ["self", "scores", "topk", "num_groups", "group_topk", "default_compute_topk"]


def test_megatron_core_tells_of_its_generator_in_these_words() -> None:
    assert "CPU RNG state changed" in inspect.getsource(megatron_random)
    assert not _is_not_rng_notice(logging.makeLogRecord({"msg": "CPU RNG state changed within a context"}))
    assert _is_not_rng_notice(logging.makeLogRecord({"msg": "another notice"}))


def test_cuda_means_the_cpu_except_in_a_block_of_plain_torch() -> None:
    with _CudaMeansCpu():
        assert torch.zeros(1, device="cuda").device == _CPU
        with plain_torch(), pytest.raises((RuntimeError, AssertionError), match=r"CUDA|NVIDIA"):
            torch.zeros(1, device="cuda:99")
        assert torch.ones(1, device="cuda").device == _CPU
