"""The FSDP2 backend computes what a dense Hugging Face model with torch.optim does, in every layout.

The claims are those of ``test_policy_parity``, over this module's cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from nemo_like.policy.options import PolicyConfig
from tests.functional.policy_fixtures import policy_config
from tests.functional.test_policy_parity import (
    ADAPTERS,
    DYNAMIC,
    EXPERT_ADAPTERS,
    MIXTURE,
    PACKED,
    SHARED,
    SOME_ADAPTERS,
    UNTIED,
    Case,
    Matrix,
    Outcome,
    as_params,
    test_each_column_and_sample_is_written_once_and_by_leaders_only,
    test_entropies_equal_the_dense_model,
    test_every_worker_counts_one_policy_version_per_training_phase,
    test_exported_adapters_equal_those_of_peft_after_its_updates,
    test_exported_weights_equal_the_dense_model_after_its_updates,
    test_logprobs_equal_the_dense_model,
    test_mismatch_metrics_weigh_every_trained_token_alike,
    test_mismatch_tags_compare_with_the_generation_logprobs_sample_by_sample,
    test_training_metrics_equal_the_dense_model,
    test_tripwires_measure_a_healthy_step_in_every_layout,
)

__all__ = [
    "test_each_column_and_sample_is_written_once_and_by_leaders_only",
    "test_entropies_equal_the_dense_model",
    "test_every_worker_counts_one_policy_version_per_training_phase",
    "test_exported_adapters_equal_those_of_peft_after_its_updates",
    "test_exported_weights_equal_the_dense_model_after_its_updates",
    "test_logprobs_equal_the_dense_model",
    "test_mismatch_metrics_weigh_every_trained_token_alike",
    "test_mismatch_tags_compare_with_the_generation_logprobs_sample_by_sample",
    "test_training_metrics_equal_the_dense_model",
    "test_tripwires_measure_a_healthy_step_in_every_layout",
]


@dataclass(frozen=True)
class FsdpCase(Case):
    fsdp: dict[str, Any] = field(default_factory=dict)

    def config(self, model: Path) -> PolicyConfig:
        cfg = policy_config(model, backend="fsdp", **self.layout, **self.options)
        return replace(cfg, fsdp_cfg=replace(cfg.fsdp_cfg, **self.fsdp))


SAVING = {"activation_checkpointing": True, "cpu_offload": True}

GPT_OSS = {"model_type": "gpt_oss", **UNTIED}
CASES = [
    FsdpCase("one process", slow=True),
    FsdpCase("one process, one sample per micro-batch", {}, {"micro_batch_size": 1}),
    FsdpCase("one process, packed", {}, PACKED),
    FsdpCase("one process, on the host between phases", {}, {"offloads": True, **PACKED}, slow=True),
    FsdpCase("one process, prompts shared", {}, SHARED),
    FsdpCase("DP2, prompts shared, recomputed and offloaded", {"dp": 2}, SHARED, fsdp=SAVING),
    FsdpCase("TP2, prompts shared", {"tp": 2}, SHARED),
    FsdpCase("one process, dynamic", {}, DYNAMIC, slow=True),
    FsdpCase("DP2", {"dp": 2}),
    FsdpCase(
        "DP2, one sample per micro-batch, sequence-level loss without KL",
        {"dp": 2},
        {"micro_batch_size": 1},
        UNTIED,
        {"token_level_loss": False},
    ),
    FsdpCase("DP2, dynamic", {"dp": 2}, DYNAMIC, slow=True),
    FsdpCase("DP2, packed, recomputed and offloaded", {"dp": 2}, PACKED, fsdp=SAVING, slow=True),
    FsdpCase("TP2", {"tp": 2}, slow=True),
    FsdpCase(
        "TP2, one sample per micro-batch, vocabulary that the ranks cannot share evenly",
        {"tp": 2},
        {"micro_batch_size": 1},
        {"vocab_size": 97, **UNTIED},
    ),
    FsdpCase("TP2, dynamic, Llama", {"tp": 2}, DYNAMIC, {"model_type": "llama", **UNTIED}, slow=True),
    FsdpCase("TP2, packed, Qwen2", {"tp": 2}, PACKED, {"model_type": "qwen2"}),
    FsdpCase("TP2 x DP2", {"tp": 2, "dp": 2}, slow=True),
    FsdpCase("CP2", {"cp": 2}),
    FsdpCase("CP2, packed, Qwen2", {"cp": 2}, PACKED, {"model_type": "qwen2"}),
    FsdpCase("CP2, dynamic", {"cp": 2}, DYNAMIC, slow=True),
    FsdpCase("CP2, packed, recomputed and offloaded", {"cp": 2}, PACKED, fsdp=SAVING, slow=True),
    FsdpCase("CP2 x DP2, packed", {"cp": 2, "dp": 2}, PACKED, slow=True),
    FsdpCase("CP2 x TP2, packed", {"cp": 2, "tp": 2}, PACKED, slow=True),
    FsdpCase("adapters, CP2", {"cp": 2}, {**ADAPTERS, **PACKED}, slow=True),
    FsdpCase("CP4, packed, more ranks than KV heads", {"cp": 4}, PACKED, slow=True),
    FsdpCase("biases of routers, DP2", {"dp": 2}, PACKED, {"model_type": "glm4_moe"}),
    FsdpCase("adapters, DP2", {"dp": 2}, {**ADAPTERS, **PACKED}),
    FsdpCase("adapters, on the host between phases", {}, {"offloads": True, **ADAPTERS}, slow=True),
    FsdpCase("some adapters, TP2", {"tp": 2}, SOME_ADAPTERS),
    FsdpCase("adapters of experts", {}, {**EXPERT_ADAPTERS, **PACKED}, MIXTURE),
    FsdpCase("adapters of experts, DP2", {"dp": 2}, {**EXPERT_ADAPTERS, **PACKED}, MIXTURE, slow=True),
    FsdpCase("adapters of gpt-oss's experts, DP2", {"dp": 2}, EXPERT_ADAPTERS, GPT_OSS, slow=True),
    FsdpCase(
        "adapters of experts, DP2, recomputed and offloaded",
        {"dp": 2},
        {**EXPERT_ADAPTERS, **DYNAMIC},
        MIXTURE,
        fsdp=SAVING,
        slow=True,
    ),
    FsdpCase("adapters beside a mixture's experts", {}, {**ADAPTERS, **PACKED}, MIXTURE, slow=True),
    FsdpCase(
        "adapters of some of Mixtral's experts' layers",
        {},
        {"adapts": ("k_proj", "w2")},
        {"model_type": "mixtral"},
        slow=True,
    ),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(CASES, tmp_path_factory.mktemp("fsdp")) as matrix:
        yield matrix


@pytest.fixture(scope="module", params=as_params(CASES), ids=lambda case: case.name)
def outcome(request: pytest.FixtureRequest, matrix: Matrix) -> Outcome:
    return matrix.outcome(request.param)
