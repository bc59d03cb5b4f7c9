from __future__ import annotations

import numpy as np
import pytest

from nemo_like.mismatch.comparison import Sizes, compared, stale_weights

SIZES = Sizes(head_size=2, num_heads=2, num_kv_heads=1, intermediate_size=4, num_experts_per_token=1)
ONES = np.ones((3, 4), np.float32)
_EPSILON = 2.0**-24


def compare(engine: dict[str, np.ndarray], **changed: np.ndarray):  # type: ignore[no-untyped-def]
    trainer = {**engine, **{name.replace("__", "."): values for name, values in changed.items()}}
    return compared(engine, trainer, ("float32", "float32"), SIZES, np.ones(3))


def test_the_bound_of_a_linear_point_grows_with_the_root_of_its_inputs() -> None:
    engine = {"layers.0.input_layernorm": ONES, "layers.0.self_attn.q_proj": ONES}
    # 8 x (1 + sqrt(4)) roundoffs of 1
    for gap, findings in ((20, 0), (28, 1)):
        changed = ONES + np.float32(gap * _EPSILON * 1.0)
        found = compare(engine, layers__0__self_attn__q_proj=changed)
        assert len(found.findings) == findings
        assert found.excess["layers.0.self_attn.q_proj"] == pytest.approx(gap / 24, rel=0.1)


def test_a_finding_has_its_first_position_and_its_heads() -> None:
    changed = ONES.copy()
    changed[1:, 2:] = 1.5
    engine = {"layers.0.input_layernorm": ONES, "layers.0.self_attn.q_proj": ONES}
    (finding,) = compare(engine, layers__0__self_attn__q_proj=changed).findings
    assert (finding.first_position, finding.num_positions, finding.num_compared) == (1, 2, 3)
    assert finding.heads == (1,)


def test_in_bfloat16_values_may_differ_by_its_roundoff() -> None:
    engine = {"norm": ONES}
    trainer = {"norm": ONES * 1.01}
    assert compared(engine, trainer, ("float32", "float32"), SIZES, np.ones(3)).findings
    assert not compared(engine, trainer, ("float32", "bfloat16"), SIZES, np.ones(3)).findings


def test_nan_is_a_difference() -> None:
    changed = ONES.copy()
    changed[2, 0] = np.nan
    found = compare({"norm": ONES}, norm=changed)
    assert found.findings[0].first_position == 2
    assert found.excess["norm"] == np.finfo(np.float64).max or np.isinf(found.excess["norm"])


def test_a_sum_of_two_values_is_rounded_once() -> None:
    changed = {"after_layers": ONES + np.float32(2.0**-20)}
    assert compare({"after_layers": ONES}, **changed).findings


def test_the_expert_without_which_no_token_differs_is_blamed() -> None:
    gate = np.eye(3, dtype=np.float32)  # each token chooses its own expert
    engine = {
        "layers.0.post_attention_layernorm": ONES,
        "layers.0.mlp.gate": gate,
        "layers.0.mlp.experts": ONES,
    }
    changed = ONES.copy()
    changed[1] = 2.0
    (finding,) = compare(engine, layers__0__mlp__experts=changed).findings
    assert finding.experts == (1,)
    # A token that rounding sends to another expert is not compared.
    other = gate.copy()
    other[1] = (1.0, 0.0, 0.0)
    found = compare(engine, layers__0__mlp__experts=changed, layers__0__mlp__gate=other)
    assert [one.name for one in found.findings] == ["layers.0.mlp.gate"]


def test_the_rotation_of_a_late_position_may_differ_more() -> None:
    late = np.ones((1001, 4), np.float32)
    changed = late + np.float32(1e-4)
    found = compared(
        {"layers.0.self_attn.rotated_q": late},
        {"layers.0.self_attn.rotated_q": changed},
        ("float32", "float32"),
        SIZES,
        np.ones(1001),
    )
    (finding,) = found.findings
    # 8 x 2^-24 x (1 + position) reaches 1e-4 at position 209.
    assert (finding.first_position, finding.num_positions) == (0, 209)


def test_a_stale_weight_is_told_with_the_newest_version_that_had_it() -> None:
    earlier = {0: {"a": 1, "b": 1}, 1: {"a": 1, "b": 2}, 2: {"a": 3, "b": 2}}
    assert dict(stale_weights({"a": 1, "b": 2}, earlier[2], earlier)) == {"a": 1}
    assert dict(stale_weights({"a": 7, "c": 9}, earlier[2], earlier)) == {"a": None}


def test_a_tied_output_layer_is_compared_with_the_embedding() -> None:
    words = {0: {"model.embed_tokens.weight": 1}, 1: {"model.embed_tokens.weight": 2}}
    assert dict(stale_weights({"lm_head.weight": 1}, words[1], words)) == {"lm_head.weight": 0}
    assert not dict(stale_weights({"lm_head.weight": 2}, words[1], words))
