from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_like.models.family import described_types
from nemo_like.models.model_info import planned_shape, read_model_info
from nemo_like.policy.backend_kinds import fsdp
from nemo_like.policy.backends.backend_kind import BackendKind, axis_size, backend_kind_of, sequence_parts
from nemo_like.policy.groups.layout import length_multiple, policy_world_size, recomputes_layers
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.options import BACKEND_KINDS, OptimizerKind

SIZES = [
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.megatron_cfg.context_parallel_size=3",
    "policy.megatron_cfg.pipeline_model_parallel_size=5",
    "policy.data_parallel_size=2",
]


def test_a_backends_axes_say_how_many_workers_a_group_has(demo):
    policy = demo(*SIZES).policy
    assert [axis_size(policy, axis) for axis in ("tp", "cp", "pp", "ep")] == [2, 3, 5, 1]
    assert policy_world_size(policy) == 60 == parallel_layout(policy).world_size
    # FSDP reads keys of its own, and has but one of the axes.
    policy = demo("policy=fsdp", "policy.fsdp_cfg.tensor_parallel_size=2", *SIZES).policy
    assert [axis_size(policy, axis) for axis in ("tp", "cp", "pp", "ep")] == [2, 1, 1, 1]
    assert policy_world_size(policy) == 4 == parallel_layout(policy).world_size


def test_sequences_are_cut_by_context_and_by_sequence_parallelism(demo):
    policy = demo(*SIZES, "policy.megatron_cfg.sequence_parallel=true").policy
    assert (sequence_parts(policy), length_multiple(policy)) == (2, 12)
    policy = demo("policy=fsdp", *SIZES, "policy.megatron_cfg.sequence_parallel=true").policy
    assert (sequence_parts(policy), length_multiple(policy)) == (1, 1)


def test_a_backend_without_keys_and_axes_is_data_parallel_alone(demo, monkeypatch):
    plain = BackendKind(about="plain", backend="a.b:C", part="", held_memory=fsdp.KIND.held_memory)
    policy = demo("policy.data_parallel_size=3").policy
    monkeypatch.setattr(type(BACKEND_KINDS), "load", lambda self, name: plain)
    assert backend_kind_of(policy) is plain
    assert parallel_layout(policy).world_size == 3 and not recomputes_layers(policy)


@pytest.mark.parametrize(("backend", "refuses"), [("megatron", True), ("fsdp", False)])
def test_what_a_backend_refuses_of_models_is_its_own(backend, refuses):
    refusal = BACKEND_KINDS.load(backend).refusal
    told = refusal("value", {"model_type": "gpt2"}) if refusal else None
    rule = "is a model of type 'gpt2'"
    remedy = f"supported are {', '.join(described_types())}; value.backend=fsdp trains others too"
    assert told == ((rule, remedy) if refuses else None)


def test_memory_is_asked_of_the_kind(demo):
    model = read_model_info(str(planned_shape("Qwen3-8B")), "megatron")
    policy = demo("policy=fsdp", "policy.data_parallel_size=4", "policy.precision=float32").policy
    held = backend_kind_of(policy).held_memory(policy, model, 0)
    assert held.weights == held.gradients == model.num_parameters * 4 // 4
    assert held.optimizer == model.num_parameters * 8 // 4
    # Of layer matrices Muon has one momentum: all but two embeddings and the norms of 4096 values.
    muon = replace(policy, optimizer=replace(policy.optimizer, kind=OptimizerKind.muon))
    matrices = model.num_parameters - 2 * 151_936 * 4096 - (2 * 36 + 1) * 4096
    spared = held.optimizer - backend_kind_of(muon).held_memory(muon, model, 0).optimizer
    assert spared == matrices * 4 // 4
    parked = replace(policy, fsdp_cfg=replace(policy.fsdp_cfg, cpu_offload=True))
    on_host = backend_kind_of(parked).held_memory(parked, model, 0)
    assert (on_host.weights, on_host.on_host) == (0, model.num_parameters * 16 // 4)
