from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from nemo_like.mismatch.comparison import Compared, Finding
from nemo_like.mismatch.search import (
    NOTHING,
    EngineMismatch,
    History,
    WeightComparison,
    compare_weights,
)
from nemo_like.mismatch.weight_words import WeightWords


def finding(name: str, first: int = 0, count: int = 8, **more: tuple[int, ...]) -> Finding:
    return Finding(name=name, excess=9.0, first_position=first, num_positions=count, num_compared=8, **more)


def mismatch(
    findings: Sequence[Finding] = (),
    differing: Mapping[str, int | None] | None = None,
    settings: str | None = None,
    compared: frozenset[str] = frozenset({"model.layers.0.self_attn.q_proj.weight"}),
    *,
    is_earlier_version: bool = False,
) -> EngineMismatch:
    return EngineMismatch(
        compared=Compared({}, tuple(findings)),
        weights=WeightComparison(
            differing=differing or {},
            compared=compared | set(differing or {}),
            version=12,
            is_earlier_version=is_earlier_version,
        ),
        settings=settings,
        num_tokens=8,
    )


def test_without_a_difference_both_agree() -> None:
    assert (mismatch().agrees, mismatch().sentences) == (True, [NOTHING])


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            finding("layers.0.self_attn.rotated_q", 5, 3),
            "weights are equal, rotated_q differs from position 5 on",
        ),
        (
            finding("layers.0.self_attn.rotated_q", 5, 2),
            "weights are equal, rotated_q differs, first at position 5",
        ),
        (finding("layers.0.self_attn.q_proj", heads=(2,)), "weights are equal, q_proj differs in head 2"),
        (finding("layers.0.self_attn.k_proj"), "it differs; the engine's weights of it are not known"),
        (
            finding("layers.0.mlp.experts", 3, 1, experts=(0, 2)),
            "it differs in experts 0, 2; the engine's weights of it are not known",
        ),
    ],
)
def test_a_finding_says_where_and_whether_weights_are_equal(found: Finding, sentence: str) -> None:
    assert mismatch([found]).sentences == [f"{found.name}: {sentence}"]


def test_differences_are_told_in_the_order_of_the_computation_and_a_weight_explains_its_point() -> None:
    found = mismatch(
        [finding("layers.1.mlp.down_proj"), finding("layers.0.self_attn.attention")],
        {"model.layers.1.mlp.down_proj.weight": 11, "model.embed_tokens.weight": None},
    )
    assert found.sentences == [
        "embed_tokens: the engine has another weight (model.embed_tokens.weight) than the trainer",
        "layers.0.self_attn.attention: weights are equal, attention differs",
        "layers.1.mlp.down_proj: the engine has the weight that it had at version 11, the trainer is at 12",
    ]


def test_a_weight_that_is_at_no_point_is_told_by_its_own_name() -> None:
    found = mismatch(
        [finding("layers.1.mlp.experts")],
        {"model.layers.1.mlp.shared_experts.up_proj.weight": 11},
        compared=frozenset({f"model.layers.{layer}.mlp.gate.weight" for layer in range(9)}),
    )
    assert found.sentences[1:] == [
        "layers.1.mlp.shared_experts.up_proj: the engine has the weight that it had at version 11, the "
        "trainer is at 12"
    ]


def test_weights_that_all_differ_get_one_sentence() -> None:
    found = mismatch(differing={"model.norm.weight": None, "lm_head.weight": 4}, compared=frozenset())
    assert found.sentences == ["every weight: the engine has other values of 2 of 2 weights than the trainer"]


def test_an_engine_that_has_an_earlier_version_as_a_whole_gets_one_sentence() -> None:
    found = mismatch(differing={"model.norm.weight": 11, "lm_head.weight": 11}, is_earlier_version=True)
    assert found.sentences == [
        "every weight: the engine has the weight that it had at version 11, the trainer is at 12"
    ]


def test_settings_are_told_where_no_module_differs() -> None:
    assert mismatch(settings="top_k").sentences == [f"{NOTHING}; the sampling settings do: top_k"]
    assert "no sampling setting explains them" in mismatch(settings="").sentences[0]
    assert not mismatch(settings="").agrees
    assert mismatch([finding("norm")], settings="top_k").sentences[0].startswith("norm:")


def test_a_tied_output_layer_that_differs_counts_as_compared() -> None:
    embedding, norm, head = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
    history = History({3: WeightWords({embedding: 1, norm: 2}, {})})
    found = compare_weights(WeightWords({embedding: 8, norm: 9, head: 8}, {}), history)
    assert found.differing == {embedding: None, norm: None, head: None}
    assert found.share == "3 of 3 weights"
    assert (
        compare_weights(WeightWords({embedding: 1, norm: 9, head: 1}, {}), history).share == "1 of 2 weights"
    )


def test_a_weight_counts_as_not_come_only_where_the_trainer_shows_a_change() -> None:
    """Of a trainer whose update changes nothing, each weight is in the engine as it was, also a wrong one."""
    q, k, norm = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight", "n"
    had = WeightWords({q: 1, k: 2, norm: 3}, {})

    def differing(engine: dict[str, int], trainer: dict[str, int], of_engine: set[int]) -> object:
        history = History({0: had, 1: WeightWords(trainer, {})}, of_engine=frozenset(of_engine))
        return compare_weights(WeightWords(engine, {}), history).differing

    assert differing({q: 1, k: 2, norm: 3}, {q: 9, k: 2, norm: 3}, {0}) == {q: None}
    assert differing({q: 1, k: 2, norm: 4}, {q: 9, k: 2, norm: 4}, {0}) == {q: 0}
    assert differing({q: 1, k: 2, norm: 3}, {q: 7, k: 8, norm: 9}, {0}) == {q: 0, k: 0, norm: 0}
    # The trainer's own weights of version 0 tell that it has changed.
    assert differing({q: 1, k: 2, norm: 3}, {q: 9, k: 2, norm: 3}, set()) == {q: 0}
