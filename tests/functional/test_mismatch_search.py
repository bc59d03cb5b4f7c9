"""Faults planted in single modules, each of which the search must name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from nemo_like.mismatch.search import NOTHING
from tests.functional.generation_fixtures import make_checkpoint
from tests.functional.mismatch_pairs import SAMPLING, Pair, config, parties_of, planted, points

pytestmark = [pytest.mark.timeout(600), pytest.mark.engine]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Qwen3 of two layers, by FSDP."""
    path = tmp_path_factory.mktemp("qwen3")
    cfg = config(make_checkpoint(path / "model", tied=True), "policy.backend=fsdp")
    with parties_of(cfg, path) as parties:
        yield Pair(cfg, parties)


@pytest.mark.parametrize(
    ("fault", "where", "differing", "sentence"),
    [
        (
            "rope_base",
            "model.layers.1.self_attn.rotary_emb",
            [f"layers.1.self_attn.rotated_{name}" for name in "qk"],
            "weights are equal, rotated_q differs from position 1 on",
        ),
        (  # which all layers share
            "short_table",
            "model.layers.0.self_attn.rotary_emb",
            [f"layers.{layer}.self_attn.rotated_{name}" for layer in (0, 1) for name in "qk"],
            "weights are equal, rotated_q differs from position 40 on",
        ),
        (
            "epsilon",
            "model.layers.1.self_attn.k_norm",
            ["layers.1.self_attn.k_norm"],
            "weights are equal, k_norm differs",
        ),
        (
            "swap",
            "model.layers.0.mlp.gate_up_proj",
            ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"],
            "the engine has another weight (model.layers.0.mlp.gate_proj.weight) than the trainer",
        ),
        (
            "attention_scale",
            "model.layers.1.self_attn.attn",
            ["layers.1.self_attn.attention"],
            "weights are equal, attention differs from position 1 on",
        ),
        (
            "left_out",
            "model.layers.0.self_attn.q_norm",
            ["layers.0.self_attn.q_norm"],
            "it differs; the engine's weights of it are not known",
        ),
        (
            "gelu",
            "model.layers.1.mlp.act_fn",
            ["layers.1.mlp.activation"],
            "weights are equal, activation differs",
        ),
    ],
)
def test_a_fault_of_one_module_is_named(
    pair: Pair, fault: str, where: str, differing: list[str], sentence: str
) -> None:
    with planted(pair, fault, where):
        found = pair.find()
    assert found.sentences[0] == f"{differing[0]}: {sentence}"
    assert points(found) == differing
    assert pair.find().sentences == [NOTHING]


def test_a_setting_of_the_sampling_that_the_trainer_does_not_apply_is_named(pair: Pair) -> None:
    found = pair.find(replace(SAMPLING, top_k=3))
    assert found.sentences == [f"{NOTHING}; the sampling settings do: top_k"]
    assert pair.find(replace(SAMPLING, temperature=0.5)).sentences[0].endswith("do: temperature")


def test_weights_that_did_not_come_are_told_with_their_version(pair: Pair) -> None:
    pair.train()
    version = pair.version
    assert pair.find().sentences == [
        f"every weight: the engine has the weight that it had at version {version - 1}, "
        f"the trainer is at {version}"
    ]
    name = "model.layers.1.self_attn.o_proj.weight"
    with planted(pair, "stale", name):
        pair.push()
        assert pair.find().sentences == [NOTHING]
        pair.train()
        pair.push()
        found = pair.find()
    assert found.sentences == [
        f"layers.1.self_attn.o_proj: the engine has the weight that it had at version {version}, "
        f"the trainer is at {version + 1}"
    ]
    pair.push()
    assert pair.find().sentences == [NOTHING]
