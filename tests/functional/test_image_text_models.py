"""The FSDP2 backend trains models that read images as transformers and torch.optim do, in every layout.

Groups have one image, two of different sizes, or none; the columns of images have one value for each group.
The claims are those of ``test_policy_parity``, over this module's cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from nemo_like.policy.options import PolicyConfig
from tests.functional.image_models import DenseImageReference, image_batch, make_checkpoint
from tests.functional.policy_fixtures import policy_config
from tests.functional.test_policy_parity import (
    DYNAMIC,
    PACKED,
    SHARED,
    Case,
    Matrix,
    Outcome,
    as_params,
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
# The group without an image is whole on one rank of two, whose other samples have images in another
# micro-batch: the ranks must still gather the vision tower together.
IMAGES_OF_GROUPS = (1, 2, 0, 1, 0, 2)


@dataclass(frozen=True)
class ImageCase(Case):
    freezes: bool = False
    fsdp: dict[str, Any] = field(default_factory=dict)

    def config(self, model: Path) -> PolicyConfig:
        cfg = policy_config(model, backend="fsdp", **self.layout, **self.options)
        return replace(cfg, freeze_vision_tower=self.freezes, fsdp_cfg=replace(cfg.fsdp_cfg, **self.fsdp))


class ImageMatrix(Matrix):
    reference = DenseImageReference
    make_checkpoint = staticmethod(make_checkpoint)

    @staticmethod
    def make_batch() -> dict[str, Any]:
        return image_batch(IMAGES_OF_GROUPS)


SAVING = {"activation_checkpointing": True, "cpu_offload": True}
QWEN3 = {"architecture": "qwen3_vl"}
ENTROPY = {"kl_penalty": 0.1, "entropy_coef": 0.01}
CASES = [
    ImageCase("Qwen2.5-VL", slow=True),
    ImageCase("Qwen2.5-VL, packed, with entropy", {}, PACKED, {}, ENTROPY),
    ImageCase("Qwen2.5-VL, prompts shared", {}, SHARED),
    ImageCase("Qwen2.5-VL, dynamic", {}, DYNAMIC, slow=True),
    ImageCase("Qwen2.5-VL, vision tower frozen", {}, PACKED, freezes=True, slow=True),
    ImageCase("Qwen3-VL, packed", {}, PACKED, QWEN3),
    ImageCase("Qwen3-VL, prompts shared", {}, SHARED, QWEN3),
    ImageCase("Qwen2.5-VL, DP2, one sample per micro-batch", {"dp": 2}, {"micro_batch_size": 1}, slow=True),
    ImageCase("Qwen2.5-VL, DP2, packed", {"dp": 2}, PACKED, slow=True),
    ImageCase("Qwen2.5-VL, DP2, vision tower frozen", {"dp": 2}, SHARED, freezes=True),
    ImageCase("Qwen2.5-VL, DP2, packed, recomputed and offloaded", {"dp": 2}, PACKED, fsdp=SAVING, slow=True),
    ImageCase("Qwen3-VL, DP2, one sample per micro-batch", {"dp": 2}, {"micro_batch_size": 1}, QWEN3),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with ImageMatrix(CASES, tmp_path_factory.mktemp("images")) as matrix:
        yield matrix


@pytest.fixture(scope="module", params=as_params(CASES), ids=lambda case: case.name)
def outcome(request: pytest.FixtureRequest, matrix: Matrix) -> Outcome:
    return matrix.outcome(request.param)


@pytest.mark.parametrize(
    "case", as_params([case for case in CASES if case.freezes]), ids=lambda case: case.name
)
def test_a_frozen_vision_tower_stays_as_it_was(case: Case, matrix: ImageMatrix) -> None:
    outcome = matrix.outcome(case)
    before = AutoModelForImageTextToText.from_pretrained(matrix.model(case), dtype=torch.float32).state_dict()
    for name, weight in outcome.exported.items():
        assert torch.equal(weight, before[name]) == name.startswith("model.visual."), name
