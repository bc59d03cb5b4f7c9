"""Every model family computes on Megatron-core what transformers with torch.optim does, in every layout.

The claims are those of ``test_policy_parity``, over this module's cases. AdamW divides a gradient by its own
size, so after three updates weights are equal only if all gradients were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.models.family import FAMILIES, Family, Part
from nemo_like.models.model_info import count_stored_scalars, read_model_info
from nemo_like.policy.groups.parallelism import parallel_layout
from tests.functional.policy_fixtures import (
    TINY_MODELS,
    MicroBatching,
    loss_config,
    make_checkpoint,
    policy_config,
    ready_worker,
)
from tests.functional.runs import ROOT
from tests.functional.test_policy_parity import (
    ADAPTERS,
    DYNAMIC,
    EXPERT_ADAPTERS,
    PACKED,
    SEQUENCE_PARALLEL,
    SHARED,
    UNTIED,
    Case,
    Matrix,
    Outcome,
    as_params,
    test_entropies_equal_the_dense_model,
    test_exported_weights_equal_the_dense_model_after_its_updates,
    test_logprobs_equal_the_dense_model,
    test_the_canary_is_scored_by_the_trained_weights_at_temperature_1,
    test_training_metrics_equal_the_dense_model,
)
from tests.functional.test_policy_parity import (
    CASES as CASES_OF_OTHERS,
)
from tests.functional.worlds import run_world

__all__ = [
    "test_entropies_equal_the_dense_model",
    "test_exported_weights_equal_the_dense_model_after_its_updates",
    "test_logprobs_equal_the_dense_model",
    "test_the_canary_is_scored_by_the_trained_weights_at_temperature_1",
    "test_training_metrics_equal_the_dense_model",
]


def cases_of(family: str) -> list[Case]:
    """The layouts of a family, of which one is quick."""
    model: dict[str, Any] = {"model_type": family, **UNTIED}
    kind = FAMILIES.load(family)
    is_mixture = kind.mixture is not None
    layouts = [
        Case(f"{family}, TP2", SEQUENCE_PARALLEL if is_mixture else {"tp": 2}, PACKED, model, slow=True),
        Case(f"{family}, PP2", {"pp": 2}, DYNAMIC, {"model_type": family}, slow=True),
    ]
    if Part.mla in kind.parts:
        stages = {"pp": 2, "end_stages": (None, 1)}
        model3 = {**model, "num_hidden_layers": 3}
        layouts.append(Case(f"{family}, PP2 of uneven stages", stages, PACKED, model3, slow=True))
    if is_mixture:
        layouts.append(Case(f"{family}, EP2", {"ep": 2, "dp": 2}, PACKED, model, slow=True))
    if kind.parts:
        # Contexts are divided where a window is as long as the longest sequence.
        wide = {**model, "sliding_window": 64} if kind.has_window else model
        layouts += [
            Case(
                f"{family}, TP2 with sequence parallelism, activation checkpointing",
                SEQUENCE_PARALLEL,
                {"activation_checkpointing": True, "moe_grouped_gemm": is_mixture or None, **PACKED},
                model,
                slow=True,
            ),
            _with_adapters(family, kind, model),
            Case(f"{family}, prompts shared", {}, SHARED, model, slow=True),
            Case(f"{family}, CP2", {"cp": 2}, PACKED, wide, slow=True),
        ]
    if kind.parts and is_mixture:
        grouped = {"moe_grouped_gemm": True, **PACKED}
        layouts.append(Case(f"{family}, experts in one matrix product", {}, grouped, model, slow=True))
        grouped = {"moe_grouped_gemm": True, **DYNAMIC}
        layouts.append(Case(f"{family}, EP2, grouped", {"ep": 2, "dp": 2}, grouped, model, slow=True))
    return [Case(f"{family}, one process", {}, PACKED, model), *layouts]


def _with_adapters(family: str, kind: Family, model: dict[str, Any]) -> Case:
    """Adapters beside all layers of a dense model; of a mixture beside queries and experts, or with latent
    attention beside the projection of its output."""
    if kind.mixture is None:
        return Case(f"{family}, adapters, TP2", {"tp": 2}, {**ADAPTERS, **PACKED}, model, slow=True)
    adapters = {"adapts": ("o_proj",)} if Part.mla in kind.parts else EXPERT_ADAPTERS
    name = f"{family}, adapters, TP2 with sequence parallelism"
    return Case(name, SEQUENCE_PARALLEL, {**adapters, **PACKED}, model, slow=True)


CASES = [case for family in FAMILIES.names() for case in cases_of(family)]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(CASES, tmp_path_factory.mktemp("families")) as matrix:
        yield matrix


@pytest.fixture(scope="module", params=as_params(CASES), ids=lambda case: case.name)
def outcome(request: pytest.FixtureRequest, matrix: Matrix) -> Outcome:
    return matrix.outcome(request.param)


def export_all(coordinates: Coordinates, models: dict[str, Path], layout: dict[str, Any]) -> None:
    """In each process of a world: load every model, and export it beside its checkpoint."""
    for path in models.values():
        worker = ready_worker(policy_config(path, **layout), loss_config(), coordinates, InMemoryDataPlane())
        worker.export_hf(f"{path}-exported")


@pytest.mark.parametrize(
    "layout", [pytest.param({}, id="one process"), pytest.param({"tp": 2, "pp": 2}, marks=pytest.mark.slow)]
)
def test_an_export_of_loaded_weights_is_the_checkpoint(layout: dict[str, Any], tmp_path: Path) -> None:
    layout = layout and {**layout, "sequence_parallel": True}
    models = {name: make_checkpoint(tmp_path / name, name) for name in FAMILIES.names()}
    world = parallel_layout(policy_config(Path("unused"), **layout))
    run_world(export_all, world, models, layout)
    for name, path in models.items():
        exported: dict[str, torch.Tensor] = {}
        for file in Path(f"{path}-exported").glob("*.safetensors"):
            exported |= load_file(file)
        stored = load_file(path / "model.safetensors")
        assert exported.keys() == stored.keys(), name
        assert all(torch.equal(tensor, stored[key]) for key, tensor in exported.items()), name


def test_the_parameters_of_every_family_are_counted(tmp_path: Path) -> None:
    for name in FAMILIES.names():
        path = make_checkpoint(tmp_path / name, name)
        assert read_model_info(str(path), "megatron").num_parameters == count_stored_scalars(path), name


# The columns of the page's table, by what a case has.
DOCUMENTED: dict[str, Callable[[Case], bool]] = {
    "TP2": lambda case: case.layout.get("tp", 1) > 1,
    "SP": lambda case: case.layout.get("sequence_parallel", False),
    "PP2": lambda case: case.layout.get("pp", 1) > 1,
    "CP2": lambda case: case.layout.get("cp", 1) > 1,
    "EP2": lambda case: case.layout.get("ep", 1) > 1,
    "grouped experts": lambda case: bool(case.options.get("moe_grouped_gemm")),
    "recomputed": lambda case: case.options.get("activation_checkpointing", False),
    "shared prompts": lambda case: case.options.get("micro_batching") is MicroBatching.shared,
    "adapters": lambda case: bool(case.options.get("adapts")),
}


def test_the_page_says_in_which_layouts_each_family_is_tested() -> None:
    head, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (ROOT / "docs" / "reference" / "models.md").read_text(encoding="utf-8").splitlines()
        if line.startswith("|") and line.count("|") == len(DOCUMENTED) + 4
    )
    assert head[1:-2] == [*DOCUMENTED]
    found = {row[0].strip("`"): row[1:-2] for row in rows}
    tested: dict[str, list[Case]] = {name: [] for name in FAMILIES.names()}
    for case in (*CASES, *CASES_OF_OTHERS):
        tested[case.model.get("model_type", "qwen3")].append(case)
    assert found == {
        name: ["yes" if any(map(has, cases)) else "" for has in DOCUMENTED.values()]
        for name, cases in tested.items()
    }


def test_every_family_has_a_tiny_model_of_its_type() -> None:
    assert TINY_MODELS.keys() == set(FAMILIES.names())
