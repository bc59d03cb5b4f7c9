"""Routers that replay what an engine's chose compute, in every layout, what a dense model does whose routers
are forced to the same choices.

The routes are random, so a token with the routes of another would be far off. The claims are those of
``test_policy_parity``, over this module's cases; the reference policy's routers choose for themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.policy.options import PolicyConfig
from tests.functional.policy_fixtures import policy_config
from tests.functional.routed_reference import RoutedReference, routed_batch
from tests.functional.test_policy_parity import (
    ATTENTION_ADAPTERS,
    DYNAMIC,
    GSPO,
    MIXTURE,
    NUM_SAMPLES,
    PACKED,
    SEQUENCE_PARALLEL,
    SHARED,
    TEMPERATURE,
    UNTIED,
    Case,
    Matrix,
    Outcome,
    as_params,
    loss_config,
    test_each_column_and_sample_is_written_once_and_by_leaders_only,
    test_entropies_equal_the_dense_model,
    test_exported_weights_equal_the_dense_model_after_its_updates,
    test_logprobs_equal_the_dense_model,
    test_the_canary_is_scored_by_the_trained_weights_at_temperature_1,
    test_training_metrics_equal_the_dense_model,
    test_tripwires_measure_a_healthy_step_in_every_layout,
)

__all__ = [
    "test_each_column_and_sample_is_written_once_and_by_leaders_only",
    "test_entropies_equal_the_dense_model",
    "test_exported_weights_equal_the_dense_model_after_its_updates",
    "test_logprobs_equal_the_dense_model",
    "test_the_canary_is_scored_by_the_trained_weights_at_temperature_1",
    "test_training_metrics_equal_the_dense_model",
    "test_tripwires_measure_a_healthy_step_in_every_layout",
]

# Of three layers the first has no experts, so that as many have them as in the other models.
DENSE_FIRST = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "n_group": 2,
    **UNTIED,
}
RECOMPUTE = {"activation_checkpointing": True}


@dataclass(frozen=True)
class ReplayCase(Case):
    def config(self, model: Path) -> PolicyConfig:
        return policy_config(model, router_replay=True, **self.layout, **self.options)


class ReplayMatrix(Matrix):
    reference = RoutedReference

    @staticmethod
    def make_batch() -> dict[str, Any]:
        return routed_batch(NUM_SAMPLES)


def case(name: str, layout: dict[str, Any], options: dict[str, Any], **more: Any) -> ReplayCase:
    return ReplayCase(name, layout, options, {**MIXTURE, **more.pop("model", {})}, **more)


CASES = [
    case("one process", {}, {}),
    case("one process, packed, recomputed", {}, {**RECOMPUTE, **PACKED}),
    case("one process, prompts shared", {}, SHARED, loss=GSPO),
    case("TP2 with sequence parallelism, packed", SEQUENCE_PARALLEL, PACKED),
    case("PP2, recomputed, one sample per micro-batch", {"pp": 2}, {"micro_batch_size": 1, **RECOMPUTE}),
    case("EP2, dynamic", {"ep": 2, "dp": 2}, DYNAMIC),
    case("one process, dynamic", {}, DYNAMIC, slow=True),
    case("one matrix product", {}, {"moe_grouped_gemm": True, **PACKED}, slow=True),
    case("prompts shared, recomputed", {}, {**SHARED, **RECOMPUTE}, slow=True),
    case("TP2 with sequence parallelism", SEQUENCE_PARALLEL, RECOMPUTE, slow=True),
    case("TP2 with sequence parallelism, prompts shared", SEQUENCE_PARALLEL, SHARED, slow=True),
    case("PP2, packed", {"pp": 2}, PACKED, slow=True),
    case("PP2, dynamic, recomputed", {"pp": 2}, {**RECOMPUTE, **DYNAMIC}, slow=True),
    case("CP2", {"cp": 2}, {}, slow=True),
    case("CP2, packed, recomputed", {"cp": 2}, {**RECOMPUTE, **PACKED}, slow=True),
    case("DP2, packed", {"dp": 2}, PACKED, slow=True),
    case("EP2", {"ep": 2, "dp": 2}, {}, slow=True),
    case("EP2, packed, recomputed", {"ep": 2, "dp": 2}, {**RECOMPUTE, **PACKED}, slow=True),
    case("EP2, prompts shared", {"ep": 2, "dp": 2}, SHARED, slow=True),
    case("EP2, adapters of attention", {"ep": 2, "dp": 2}, ATTENTION_ADAPTERS, slow=True),
    case("EP2 with TP2, untied", {"ep": 2, **SEQUENCE_PARALLEL}, {}, model=UNTIED, slow=True),
    case("EP4 over TP2 and DP2", {"ep": 4, "dp": 2, **SEQUENCE_PARALLEL}, PACKED, slow=True),
    case("EP2 x PP2", {"ep": 2, "dp": 2, "pp": 2}, {**DYNAMIC, **RECOMPUTE}, slow=True),
    case("CP2 x TP2", {"cp": 2, **SEQUENCE_PARALLEL}, PACKED, loss=GSPO, slow=True),
    case(
        "latent attention, a stage of a dense and a mixture layer",
        {"pp": 2, "end_stages": (None, 1)},
        {**PACKED, **RECOMPUTE},
        model=DENSE_FIRST,
        slow=True,
    ),
    case(
        "latent attention, a stage without experts, TP2",
        {"pp": 2, "end_stages": (1, None), **SEQUENCE_PARALLEL},
        SHARED,
        model=DENSE_FIRST,
        slow=True,
    ),
    case("gpt-oss, packed", {}, PACKED, model={"model_type": "gpt_oss", **UNTIED}, slow=True),
    case("TP2 x PP2", {"pp": 2, **SEQUENCE_PARALLEL}, {**PACKED, **RECOMPUTE}, slow=True),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplayMatrix]:
    with ReplayMatrix(CASES, tmp_path_factory.mktemp("replay")) as matrix:
        yield matrix


@pytest.fixture(scope="module", params=as_params(CASES), ids=lambda case: case.name)
def outcome(request: pytest.FixtureRequest, matrix: ReplayMatrix) -> Outcome:
    return matrix.outcome(request.param)


def test_the_share_of_other_choices_is_that_of_the_dense_routers(
    outcome: Outcome, matrix: ReplayMatrix
) -> None:
    case = outcome.case
    cfg = case.config(matrix.model(case))
    dense = RoutedReference(cfg, loss_config(**case.loss), TEMPERATURE)
    with torch.no_grad():
        dense.logprobs(outcome.batch)
    measured = outcome.metrics("scores")["routing_disagreement"]
    # A prompt that samples share counts once.
    tolerance = 0.02 if cfg.sequence_packing.share_prompts else 1e-9
    assert measured.value == pytest.approx(dense.num_different / dense.num_compared, abs=tolerance)
    assert measured.value > 0.5  # the routes are random
